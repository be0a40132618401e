--[[
sliding_window.lua: settle what instances spent in the current sub-window and lease them more. The estimate is what was
debited in the full sub-windows inside the window, plus the oldest weighted by its part still inside. It only falls
between grants, and a lease dies with its sub-window, so the estimate on actual admissions never exceeds the limit.

KEYS[i]    string "<prefix>1:{<g>}<limiter>:<key>": 14 numbers of 7 bytes: layout to known as in fixed_window.lua, sub-window
           (number since the epoch), its length µs, out (leased in it, neither committed nor returned); the width of a count in
           bytes (1 byte); and the counts of the sub-windows, newest first
ARGV[1]    a header; policies: 5 numbers; for each key an ask: 7, a report: 8 if it has one, and pairs as in
           token_bucket.lua, but
  policy   3 limit                                         report   1 own      own admissions still inside the window
           4 sub           sub-windows, 1..100                      2 lease    sub-window of the lease
                                                                    7 back     1: first exchange after this instance was
                                                                               missing; own holds what its share admitted
Reply      now, late, then per key 15 numbers, as in token_bucket.lua; slot is the sub-window
Clock      server TIME, read once; sub-windows are aligned to the epoch       Cost  O(sub-windows) per key: MGET of all, SET
TTL        end of the sub-window + window + 1 s
Delivery   debits may run twice; credits (spent, unspent, refund, back) at most once
--]]
local SLIDING, SLIDING_BYTES = 3, 99
local SLIDING_STATE = '<I7I7I7I7I7I7I7I7I7I7I7I7I7I7I1'

for i = 1, #keys do
  --+ ask
  local limit = capacity
  local length = idiv(period, sub)
  local w = idiv(now, length)
  text = with_counts(text, SLIDING, SLIDING_BYTES)
  local made = not text
  local born, version, exp, lost, aend, ac, ap, seen_episode, reported, known = now, 0, 0, 0, 0, 0, 0, 0, 0, 0
  local index, unit, out, counts = w, length, 0, nil -- counts[1] is that of the newest sub-window
  if text then
    local width
    _, born, version, exp, lost, aend, ac, ap, seen_episode, reported, known, index, unit, out, width = read(SLIDING_STATE, text, 1)
    local n = (#text - SLIDING_BYTES) / width
    counts = {read(counts_format(n, width), text, SLIDING_BYTES + 1)}
    counts[n + 1] = nil
  end
  --+ active
  if not counts or unit ~= length or #counts ~= sub + 1 then
    -- Another division of time: all that may still be inside counts as of now.
    local sum = 0
    for _, count in ipairs(counts or {}) do sum = sum + count end
    if counts and now >= (index + #counts) * unit then sum = 0 end
    counts, index, unit = {min(sum, MOST)}, w, length
    for j = 2, sub + 1 do counts[j] = 0 end
  end
  if index == w + 1 then
    w = index -- the server's clock stepped back over the boundary: the sub-window that had begun goes on
  elseif index ~= w then
    local steps = w - index
    if steps < 0 or steps > sub then steps = sub + 1 end
    for j = sub + 1, 1, -1 do counts[j] = j > steps and counts[j - steps] or 0 end
    out = 0
  end
  local finish = (w + 1) * length
  -- The part of the oldest sub-window still inside, in 1/length.
  local inside = min(length, finish - now)

  --+ refute
  if is_lost then counts[1] = min(MOST, counts[1] + own + carry) end

  if seen_episode ~= episode then seen_episode, reported, known = episode, 0, 0 end
  -- A view of before a return does not know of it; what that member told, it must not take for another's.
  if known < returned then known = returned end
  if back == 1 then
    reported = reported + 1
    counts[1] = min(MOST, counts[1] + own)
  end
  local effective = limit
  if until_ > 0 and now >= from and (missing > 0 or now <= until_ + period + length) then
    --+ aside
  end

  -- What was debited in a sub-window and comes back unspent was never admitted: it may come back for as long as its
  -- sub-window counts.
  local age = w - lease
  local credited = lease > 0 and age == 0 and not is_lost
  if lease > 0 and not is_lost and age >= 0 and age <= sub then
    local count = counts[age + 1]
    if unspent > count then unspent = count end
    counts[age + 1] = count - unspent
    if credited then out = spent + unspent < out and out - spent - unspent or 0 end
  end
  if refund == RESET then
    for j = 2, sub + 1 do counts[j] = 0 end
    counts[1] = min(counts[1], out)
  elseif refund > 0 then
    counts[1] = min(counts[1], max(out, counts[1] - refund))
  end

  local full = 0
  for j = 1, sub do full = full + counts[j] end
  local q, r = muldiv(counts[sub + 1], inside, length)
  if r > 0 then q = q + 1 end
  local life, left = finish - now - 1, max(0, effective - full - q)
  if life <= 0 then want = 0 end
  --+ serve
  counts[1], out, full = counts[1] + served + granted, out + granted, full + served + granted
  if served + granted > 0 then version = version + 1 end
  local remaining = max(0, effective - full - q)

  -- When the cost would pass: sub-window by sub-window the oldest leaves linearly.
  local cost = worst > 0 and worst or 1
  local retry = -1
  if cost <= remaining then
    retry = 0
  elseif cost <= effective then
    local allowed, t = effective - cost, now
    for j = sub + 1, 1, -1 do
      local oldest, ends = counts[j], finish + (sub + 1 - j) * length
      if allowed >= full then
        -- ceil(oldest * (ends - t) / length) <= allowed - full: the largest part inside that still fits
        local fits = length
        if oldest > 0 then fits = min(length, (muldiv(allowed - full, length, oldest))) end
        retry = max(t, ends - fits) - now
        break
      end
      t = ends
      full = full - (counts[j - 1] or 0)
    end
  end
  local reset = 0
  for j = 1, sub + 1 do
    if counts[j] > 0 then
      reset = finish + (sub + 1 - j) * length - now
      break
    end
  end
  local width = width_of(max(unpack(counts)))
  local us = finish - now + period + 1000000
  --+ keep
  text = pack(SLIDING_STATE, SLIDING, born, version, exp, lost, aend, ac, ap, seen_episode, reported, known, w, length, out, width) ..
    pack(counts_format(sub + 1, width), unpack(counts))
  local lease_slot, delay = w, 0
  --+ answer
end
--+ write
