--[[
each.lua: what the five exchange scripts do alike for a key, in parts. lua.go puts a part where a script has the line
"--+ <name>": as a function it would be made anew in each call (0.15 µs) and called for each key (0.1 µs). This and that an ask is read
once saved a sixth of the time of a key and a fifth of that of a call for one.

KEYS[i]    as in prelude.lua; i is the number of the key
--]]

--= ask: reads and checks what comes for key i: the ask, its policy and the report. The header of token_bucket.lua says what is what.
if after + ASK_BYTES > stop then return fault('key ' .. i .. ' has no ask') end
local policy, reports, needs, known_born, known_version, seen, want, pairs_at = read(ASK, data, after)
if known_born > MOST or known_version > MOST or seen > MOST or want > MOST or reports > 3 then
  return fault('key ' .. i .. ': a number out of range')
end
if policy ~= last_policy then -- most keys of a call have the same
  if policy < 1 or policy > count then return fault('key ' .. i .. ': no such policy') end
  rate, period, capacity, sub, slot = read(POLICY, data, policies_at + (policy - 1) * POLICY_BYTES)
  if max(rate, period, capacity, sub, slot) > MOST then return fault('policy ' .. policy .. ': a number out of range') end
  if min(period, sub, slot) < 1 then return fault('policy ' .. policy .. ' wants a period, sub-windows and a slot of at least 1') end
  last_policy = policy
end
local own, lease, spent, carry, unspent, refund, back, spends = 0, 0, 0, 0, 0, 0, 0, 0
local whole = reports > 1
if reports == 1 or reports == 3 then
  if pairs_at + REPORT_BYTES > stop then return fault('key ' .. i .. ' has no report') end
  own, lease, spent, carry, unspent, refund, back, spends, pairs_at = read(REPORT, data, pairs_at)
  if max(own, lease, spent, carry, unspent, refund) > MOST or back > 1 then
    return fault('key ' .. i .. ': a number out of range')
  end
  for at = pairs_at, min(pairs_at + spends * PAIR_BYTES, stop) - PAIR_BYTES, PAIR_BYTES do
    local age, n = read(PAIR, data, at)
    if age > MOST or n > MOST then return fault('key ' .. i .. ': a pair out of range') end
  end
end
after = pairs_at + (needs + spends) * PAIR_BYTES
if after > stop then return fault('key ' .. i .. ' has fewer pairs than it says') end
local text = stored and stored[keys[i]] or states[i]

--= active: counts the caller among the instances that exchanged this key in the current activity slot: its end (aend), how many in it
-- (ac), how many in the one before (ap).
if now >= aend or aend - now > slot then
  ap = now < aend + slot and ac or 0
  ac, aend = 0, now + slot
end
if seen ~= aend then ac = ac + 1 end
local active = ac > ap and ac or ap > 1 and ap or 1

--= refute: what becomes of a key when the caller knows more of it than the key itself: it was lost and made anew, or rolled back by a
-- replica that lacked the last writes. A rolled back key becomes a new incarnation, so that the others notice too. tell:
-- whether the incarnation still has to be told so.
local is_lost = known_born > 0 and (made or known_born ~= born or known_version > version)
local tell = is_lost
if is_lost then
  if not made and known_born == born then
    born, version = now, known_version
  elseif not made then
    tell = lost == 0
  end
  lost = 1
end

--= aside: what is left of a window's limit while shares are kept aside: of the members missing, whose shares are based on fleet, and
-- of those that came back, so many as the key knows of, and have not yet told this key what their share admitted, whose
-- shares were based on least.
effective = max(0, reserved(limit, missing, fleet) + reserved(limit, max(0, known - reported), least) - limit)

--= serve: serves waiting callers from left in their order, each all or nothing, from the needs' pairs (cost, count); worst is the largest
-- cost that was not served (0: none). Then of the tokens left one instance may lease an equal part, or all that it wants whole. A hundredth of the capacity is
-- not divided: that is about what returns during the pause after a short grant, and if one instance of n is hot, n times as much
-- would always lie idle.
local served, worst, granted = 0, 0, 0
local pair_at = pairs_at + spends * PAIR_BYTES
for _ = 1, needs do
  local cost, n
  cost, n, pair_at = read(PAIR, data, pair_at)
  if cost > MOST or n > MOST then return fault('key ' .. i .. ': a pair out of range') end
  local all = cost * n
  if all <= left then
    served, left = served + all, left - all
  else
    local k = idiv(left, cost)
    served = served + k * cost
    left = left - k * cost
    if cost > worst then worst = cost end
  end
end
if want > 0 and left > 0 then
  local equal, hundredth = idiv(left, active), idiv(capacity, 100)
  if whole then equal = left elseif equal < hundredth then equal = hundredth < left and hundredth or left end
  granted = want < equal and want or equal
end

--= keep: until when a key is kept that has to be there for so many µs: never less than before, since instances hold claims until then.
if us > TWENTY_YEARS then us = TWENTY_YEARS end
if exp < now + us then exp = now + us end

--= answer: notes the state of key i, to expire at exp, and the answer for it. '%d' prints every digit, where tostring and .. keep 14, without
-- the part of one; windows that end together have the same (0.3 µs). What is nearly always the same is left out: nothing leased, one instance active, the
-- born that the caller knows.
states[i] = text
if stored then stored[keys[i]] = text end
if exp ~= expires then expires, expiry = exp, format('%d', (exp - now + 999) / 1000) end
expiries[i] = expiry
local flags, as = (is_lost and 1 or 0) + (credited and 2 or 0), REPLY
if granted + out + delay > 0 or active > 1 or born ~= known_born then flags, as = flags + 4, REPLY_WHOLE end
if life < 0 then life = 0 end
replies[i + 1] = pack(as, flags, served, lease_slot, life, remaining, retry, reset, aend, version, exp - now, granted, out, active,
  born, delay)

--= write: when all keys of the call are done, and nothing was wrong.
if after ~= stop then return fault('wants no more than one ask for each key') end
for i = 1, #keys do redis.call('SET', keys[i], states[i], 'PX', expiries[i]) end
return table.concat(replies)
