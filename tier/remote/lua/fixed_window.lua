--[[
fixed_window.lua: settle what instances spent in the current window and lease them more. A lease dies with its window.

KEYS[i]    string "<prefix>1:{<g>}<limiter>:<key>": 15 numbers of 7 bytes: layout, born, version, exp, lost and activity as in
           bucket.lua, episode of darkness, members that told in it what their share admitted, returns in it that some
           exchange knew of, window (number since the epoch),
           period µs, count (debited), out (leased, neither committed nor returned)
ARGV[1]    a header; policies: 5 numbers; for each key an ask: 7, a report: 8 if it has one, and pairs as in
           token_bucket.lua, but
  policy   3 limit                                         report   1 own      own admissions in window `lease`
                                                                    2 lease    window of the lease; also of own
                                                                    7 back     1: first exchange after this instance was
                                                                               missing; own holds what its share admitted
Reply      now, late, then per key 15 numbers, as in token_bucket.lua; slot is the window
Clock      server TIME, read once; windows are aligned to the epoch       Cost  O(1) per key: MGET of all, SET
TTL        end of the window + 1 s
Delivery   debits may run twice; credits (spent, unspent, refund, back) at most once
--]]
local FIXED, FIXED_BYTES = 2, 105
local FIXED_STATE = '<I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7'

for i = 1, #keys do
  --+ ask
  local limit = capacity
  if text and (byte(text) ~= FIXED or #text ~= FIXED_BYTES) then text = nil end
  local made = not text
  local w = idiv(now, period)
  local born, version, exp, lost, aend, ac, ap, seen_episode, reported, known = now, 0, 0, 0, 0, 0, 0, 0, 0, 0
  local window, length, debited, out = w, period, 0, 0
  if text then
    _, born, version, exp, lost, aend, ac, ap, seen_episode, reported, known, window, length, debited, out = read(FIXED_STATE, text, 1)
  end
  --+ active
  if length ~= period then
    -- Another window length: what was counted in a window that is not over counts on.
    if (window + 1) * length <= now then debited, out = 0, 0 end
    window, length = w, period
  end
  if window == w + 1 then
    w = window -- the server's clock stepped back over the boundary: the window that had begun goes on
  elseif window ~= w then
    window, debited, out = w, 0, 0
  end
  local start, finish = w * period, (w + 1) * period

  --+ refute
  if is_lost and lease == w then debited = min(MOST, debited + own + carry) end

  if seen_episode ~= episode then seen_episode, reported, known = episode, 0, 0 end
  -- A view of before a return does not know of it; what that member told, it must not take for another's.
  if known < returned then known = returned end
  if back == 1 then
    reported = reported + 1
    if lease == w or lease == 0 then debited = min(MOST, debited + own) end
  end
  local effective = limit
  if until_ > 0 and start >= from and (missing > 0 or start <= until_) then
    --+ aside
  end

  local credited = lease > 0 and lease == w and not is_lost
  if credited then
    if unspent > debited then unspent = debited end
    debited = debited - unspent
    out = spent + unspent < out and out - spent - unspent or 0
  end
  if refund == RESET then
    debited = min(debited, out)
  elseif refund > 0 then
    debited = min(debited, max(out, debited - refund))
  end

  local life, left = finish - now - 1, max(0, effective - debited)
  if life <= 0 then want = 0 end
  --+ serve
  debited, out = debited + served + granted, out + granted
  if served + granted > 0 then version = version + 1 end
  local remaining = max(0, effective - debited)

  local cost = worst > 0 and worst or 1
  local retry = -1
  if cost <= limit then
    retry = cost <= remaining and 0 or finish - now
  end
  local reset = debited > 0 and finish - now or 0
  local us = finish - now + 1000000
  --+ keep
  text = pack(FIXED_STATE, FIXED, born, version, exp, lost, aend, ac, ap, seen_episode, reported, known, w, period, debited, out)
  local lease_slot, delay = w, 0
  --+ answer
end
--+ write
