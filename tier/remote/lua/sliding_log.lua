--[[
sliding_log.lua: settle what instances spent and lease them more, so that any (t-window, t] holds at most the limit. The
log has one weight per tick of 1/500 of the window, not one entry per request. A tick leaves when its end is a window ago;
a lease counts until it is committed (then with the ticks in which it was spent) or a window after it died.

KEYS[i]    string "<prefix>1:{<g>}<limiter>:<key>": 19 numbers of 7 bytes: layout to known as in fixed_window.lua, tick µs, slot
           µs, end of the current slot µs, end of the previous slot µs (0: none), leased in the current slot, leased in the
           previous slot, sum of all weights, first tick in use (number since the epoch); the width of a weight in bytes
           (1 byte); and the weights of the first tick and all after it, up to the last in use
ARGV[1]    a header; policies: 5 numbers; for each key an ask: 7, a report: 8 if it has one, and pairs as in
           token_bucket.lua, but
  policy   3 limit                                         report   1 own      own admissions still inside the window
                                                                    7 back     1: first exchange after this instance was
                                                                               missing; own holds what its share admitted
                                                                    8 spends   pairs (age µs, count) of spent
Reply      now, late, then per key 15 numbers, as in token_bucket.lua
Clock      server TIME, read once
Cost       O(ticks in use) per key, as a copy of 500 to 1000 weights: MGET of all, SET; each tick is pruned once; a denial
           looks through the oldest ticks
TTL        2 slots + window + tick + 1 s
Delivery   debits may run twice; credits (spent, carry, unspent, refund, back) at most once
--]]
local LOG, LOG_BYTES = 4, 134
local LOG_STATE = '<I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I1'
local find, cut, rep = string.find, string.sub, string.rep

-- The weights of the ticks from first on stand in text from byte start on, each in width bytes; the first and the last are
-- not 0, if there are any.

-- The first tick in use from byte at on: how many after first, its weight, and where the next begins.
local function used(text, start, width, at)
  at = find(text, '[^%z]', at)
  if not at then return nil end
  local n = idiv(at - start, width)
  return n, read(counts_format(1, width), text, start + n * width)
end

-- The same number of weights in wider ones.
local function widen(weights, width, wider)
  local n = #weights / width
  return pack(counts_format(n, wider), read(counts_format(n, width), weights, 1))
end

-- A note to add n to the weight of tick t. Returns what it will be more: nothing for a tick that left.
local function add(more, gone, t, n)
  if n <= 0 or t <= gone then return 0 end
  if not more.low or t < more.low then more.low = t end
  if not more.high or t > more.high then more.high = t end
  more[t] = (more[t] or 0) + n
  return n
end

-- Adds what is noted. Returns all weights as three parts, before, within and after the range of the notes; and their width and
-- the first tick.
local function merge(more, text, start, width, first)
  local low, high = more.low, more.high
  if not low then return cut(text, start), '', '', width, first end
  local n = (#text - start + 1) / width
  if n == 0 then first = low end
  local last = first + n - 1
  if low == high and low >= last and n > 0 then
    -- One tick, the last in use or one after it: nearly always. Without a list of weights it takes half of the time.
    local weight, stop = more[low], #text
    if low == last then
      stop = stop - width
      weight = weight + read(counts_format(1, width), text, stop + 1)
    end
    if weight < 256 ^ width then
      return cut(text, start, stop) .. rep('\0', (low - last - 1) * width), pack(counts_format(1, width), weight), '', width, first
    end
  end
  if low < first then
    text = cut(text, 1, start - 1) .. rep('\0', (first - low) * width) .. cut(text, start)
    n, first = n + first - low, low
  end
  local from, to = min(low - first, n), high - first + 1
  local list = {}
  if from < n then
    list = {read(counts_format(min(n, to) - from, width), text, start + from * width)}
    list[#list] = nil
  end
  for j = #list + 1, to - from do list[j] = 0 end
  for t = low, high do
    if more[t] then list[t - first - from + 1] = list[t - first - from + 1] + more[t] end
  end
  local before, after = cut(text, start, start + from * width - 1), cut(text, start + to * width)
  local wider = width_of(max(unpack(list)))
  if wider > width then
    before, after, width = widen(before, width, wider), widen(after, width, wider), wider
  end
  return before, pack(counts_format(#list, width), unpack(list)), after, width, first
end

-- When what was admitted in tick t is outside the window, from now on.
local function leaves(t, tick, period) return (t + 1) * tick + period - now end

for i = 1, #keys do
  --+ ask
  local limit = capacity
  local tick = max(1, idiv(period, 500))
  local current = idiv(now, tick)
  text = with_counts(text, LOG, LOG_BYTES)
  local made = not text
  local born, version, exp, lost, aend, ac, ap, seen_episode, reported, known = now, 0, 0, 0, 0, 0, 0, 0, 0, 0
  local unit, length, send, pend, oc, op, sum, first, width = tick, slot, now + slot, 0, 0, 0, 0, current, 1
  local start = LOG_BYTES + 1
  if made then
    text, start = '', 1
  else
    _, born, version, exp, lost, aend, ac, ap, seen_episode, reported, known, unit, length, send, pend, oc, op, sum, first, width =
      read(LOG_STATE, text, 1)
  end
  --+ active

  -- Ticks that left; and ticks to come, of before the server's clock went back: they count as of now.
  local gone = idiv(max(0, now - period), tick) - 1
  local more = {}
  if unit ~= tick then
    -- Another window length: all that may still be inside counts as of now.
    text, start, width, sum = '', 1, 1, add(more, gone, current, sum)
  end
  if first <= gone then
    local n, weight, at = used(text, start, width, start)
    while n and first + n <= gone do
      sum = sum - weight
      n, weight, at = used(text, start, width, at)
    end
    if n then start, first = start + n * width, first + n else text, start = '', 1 end
  end
  if first + (#text - start + 1) / width - 1 > current then
    local kept, later = start + max(0, current + 1 - first) * width, 0
    local n, weight, at = used(text, start, width, kept)
    while n do
      later = later + weight
      n, weight, at = used(text, start, width, at)
    end
    text = cut(text, 1, kept - 1)
    add(more, gone, current, later)
  end

  if send - now > length then oc, op, pend, send = oc + op, 0, 0, now + length end
  while now >= send do
    if oc + op == 0 then
      length, pend, send = slot, 0, now + slot
      break
    end
    sum = sum + add(more, gone, idiv(send, tick), op) -- nobody reported them: they count as spent when their leases died
    op, oc, pend = oc, 0, send
    length = max(length, slot)
    send = send + length
  end
  local longest = max(length, slot)

  --+ refute
  if is_lost then sum = sum + add(more, gone, current, min(MOST, own + carry)) end
  if seen_episode ~= episode then seen_episode, reported, known = episode, 0, 0 end
  -- A view of before a return does not know of it; what that member told, it must not take for another's.
  if known < returned then known = returned end
  if back == 1 then
    reported = reported + 1
    sum = sum + add(more, gone, current, own)
  end
  local effective = limit
  if until_ > 0 and now >= from and (missing > 0 or now <= until_ + 2 * period) then
    --+ aside
  end

  -- Credits.
  local credited = lease > 0 and not is_lost and (lease == send or lease == pend)
  if credited then
    local out = lease == send and oc or op
    for j = 1, max(1, spends) do
      local age, count = 0, spent
      if spends > 0 then age, count = read(PAIR, data, pairs_at + (j - 1) * PAIR_BYTES) end
      count = min(count, out)
      out = out - count
      sum = sum + add(more, gone, idiv(max(0, now - min(age, 2 * length + period)), tick), count)
    end
    out = out - min(unspent, out)
    if lease == send then
      oc = out
    else
      op = out
      if sum + oc + op > effective then
        credited = carry == 0 -- not renewed: see bucket.lua
      else
        carry = min(carry, op)
        op, oc = op - carry, oc + carry
      end
    end
  end
  if refund == RESET then
    text, start, width, sum, more = '', 1, 1, 0, {}
  elseif refund > 0 and sum > 0 then
    -- Out of the newest ticks.
    local before, within, after
    before, within, after, width, first = merge(more, text, start, width, first)
    text, start, more = before .. within .. after, 1, {}
    local n = #text / width
    local list = {read(counts_format(n, width), text, 1)}
    while n > 0 and (refund > 0 or list[n] == 0) do
      local taken = min(refund, list[n])
      refund, sum, list[n] = refund - taken, sum - taken, list[n] - taken
      if list[n] == 0 then n = n - 1 end
    end
    text = n > 0 and pack(counts_format(n, width), unpack(list)) or ''
  end

  local left = max(0, effective - sum - oc - op)
  --+ serve
  sum, oc = sum + add(more, gone, current, served), oc + granted
  if served + granted > 0 then version = version + 1 end
  local remaining = max(0, effective - sum - oc - op)

  local before, within, after
  before, within, after, width, first = merge(more, text, start, width, first)
  local us = 2 * longest + period + tick + 1000000
  --+ keep
  text = pack(LOG_STATE, LOG, born, version, exp, lost, aend, ac, ap, seen_episode, reported, known, tick, length, send, pend, oc, op, sum,
    first, width) .. before .. within .. after
  start = LOG_BYTES + 1

  -- When the cost would pass: once enough has left, oldest first; leases last, a window after they die.
  local cost = worst > 0 and worst or 1
  local retry = -1
  if cost <= remaining then
    retry = 0
  elseif cost <= effective then
    local over = sum + oc + op + cost - effective
    local n, weight, at = used(text, start, width, start)
    while n and over > weight do
      over = over - weight
      n, weight, at = used(text, start, width, at)
    end
    retry = leaves(n and first + n or idiv(over <= op and send or send + longest, tick), tick, period)
  end
  local reset = 0
  if sum > 0 then reset = max(0, leaves(first + (#text - LOG_BYTES) / width - 1, tick, period)) end
  if op > 0 then reset = max(reset, leaves(idiv(send, tick), tick, period)) end
  if oc > 0 then reset = max(reset, leaves(idiv(send + longest, tick), tick, period)) end
  local lease_slot, life, out, delay = send, send + length - now - 1, oc + op, 0
  --+ answer
end
--+ write
