--[[
bucket.lua: the core of the two bucket scripts, put after the prelude and one of them.

KEYS[i]    string "<prefix>1:{<g>}<limiter>:<key>": 13 numbers of 7 bytes: layout, born (server time of this incarnation), version
           (grants so far), exp (end of its time to live), activity (end of its slot, instances in it, instances in the slot
           before), length of a slot µs, end of the current slot µs, level (whole tokens), fraction (1/period of a token),
           time of the level µs, period µs. Then, unless they are all 0, 6 more: lost (1: made anew after a loss), end of the
           previous slot µs, granted in the current slot, granted in the previous slot, missing and fleet as of the last
           exchange
Source     a token bucket with an outstanding floor: level + outstanding <= capacity, with outstanding bounded by what
           was granted in the current and the previous slot. Refill above that is discarded as time passes: at each
           rollover before anything else.
--]]
local BUCKET, BUCKET_BYTES = 1, 91
local WHOLE_BYTES = 133
local BUCKET_STATE = '<I7I7I7I7I7I7I7I7I7I7I7I7I7'
local BUCKET_WHOLE = '<I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7I7'

-- Refills to t at rate r per unit, up to cap.
local function refill(level, fraction, ts, t, r, unit, cap)
  if cap < 0 then cap = 0 end
  if t > ts then
    if level < cap and r > 0 then
      local p, q, f = (t - ts) * r
      if p + unit <= MOST then -- nearly always: one division instead of two calls
        p = p + fraction
        q = p / unit
        q = q - q % 1
        if q * unit > p then q = q - 1 end
        f = p - q * unit
      else
        q, f = muldiv(t - ts, r, unit)
        f = f + fraction
        if f >= unit then q, f = q + 1, f - unit end
      end
      level, fraction = q < MOST - level and level + q or MOST, f
    end
    ts = t
  end
  if level >= cap then return cap, 0, ts end
  return level, fraction, ts
end

-- As refill, as far as the outstanding tokens let it, through the rollovers on the way to t. What is left is to refill
-- within the last slot.
local function roll(t, r, unit, cap, slot, length, send, pend, oc, op, level, fraction, ts)
  while t >= send do
    if oc + op == 0 then return slot, t + slot, 0, 0, 0, level, fraction, ts end
    -- Discards what the outstanding tokens forbid, before they are forgotten.
    level, fraction, ts = refill(level, fraction, ts, send, r, unit, cap - oc - op)
    op, oc, pend = oc, 0, send
    if slot > length then length = slot end
    send = send + length
  end
  return length, send, pend, oc, op, level, fraction, ts
end

-- When a cost would pass that does not now: within a slot the level rises up to what the outstanding tokens leave; they are forgotten at
-- the next two rollovers.
local function retry_after(cost, r, unit, cap, length, send, oc, op, level, fraction, ts)
  local base = ts > now and ts or now
  for step = 1, 3 do
    local room = max(0, cap - op - oc)
    if level >= cost then return base - now end
    local full = time_for((cost < room and cost or room) - level, r, unit, fraction)
    if cost <= room and (step == 3 or full <= send - base) then
      full = base - now + full
      return full < MOST and full or MOST
    end
    if step < 3 then
      level, fraction, base = refill(level, fraction, base, send, r, unit, room)
      op, oc, send = oc, 0, send + length
    end
  end
end

for i = 1, #keys do
  --+ ask
  if rate == 0 then capacity = 0 end -- denies everything
  if text and (byte(text) ~= BUCKET or #text ~= BUCKET_BYTES and #text ~= WHOLE_BYTES) then text = nil end
  local made = not text
  local born, version, exp, aend, ac, ap = now, 0, 0, 0, 0, 0
  local length, send, level, fraction, ts, unit
  local lost, pend, oc, op, dm, dn = 0, 0, 0, 0, 0, 0
  if made then
    -- Never touched, or its time to live is over, in which it would have become full had nobody been missing. So it may
    -- have been empty as long ago as it takes to fill it; what happened since is known. Without darkness: full.
    local ago = rate > 0 and time_for(capacity, rate, period, 0) or TWENTY_YEARS
    if ago > TWENTY_YEARS then ago = TWENTY_YEARS end
    length, send = slot, now + slot
    level, fraction, ts, unit = max(0, capacity - muldiv(ago, rate, period)), 0, now - ago, period
  elseif #text == BUCKET_BYTES then
    _, born, version, exp, aend, ac, ap, length, send, level, fraction, ts, unit = read(BUCKET_STATE, text, 1)
  else
    _, born, version, exp, aend, ac, ap, length, send, level, fraction, ts, unit, lost, pend, oc, op, dm, dn =
      read(BUCKET_WHOLE, text, 1)
  end
  --+ active

  if unit ~= period then
    fraction = muldiv(fraction, period, unit)
    unit = period
  end
  -- A server clock that went back: what is outstanding stays so for two slots, and nothing is refilled for the step.
  if send - now > length then oc, op, pend, send = oc + op, 0, 0, now + length end
  if ts > now and ts - now > 2 * max(slot, length) then ts = now end

  -- Through the darkness that is remembered, then to now, with who is missing now.
  local dark = until_ < now and until_ or now
  if ts < dark then
    if made and ts < from then
      level, fraction, ts = refill(level, fraction, ts, from < now and from or now, rate, unit, capacity)
    end
    if ts < dark then
      local r, cap = reserved(rate, most, least), reserved(capacity, most, least)
      length, send, pend, oc, op, level, fraction, ts =
        roll(dark, r, unit, cap, slot, length, send, pend, oc, op, level, fraction, ts)
      level, fraction, ts = refill(level, fraction, ts, dark, r, unit, cap - oc - op)
      dm, dn = missing, fleet
    end
  end
  local r, cap = rate, capacity
  if missing > 0 then r, cap = reserved(rate, missing, fleet), reserved(capacity, missing, fleet) end
  local low_r, low_cap = r, cap
  if dm > 0 then low_r, low_cap = min(r, reserved(rate, dm, dn)), min(cap, reserved(capacity, dm, dn)) end
  if now >= send then
    length, send, pend, oc, op, level, fraction, ts =
      roll(now, low_r, unit, low_cap, slot, length, send, pend, oc, op, level, fraction, ts)
  end
  level, fraction, ts = refill(level, fraction, ts, now, low_r, unit, low_cap - oc - op)
  local longest = slot > length and slot or length

  --+ refute
  if tell then level, fraction, ts = 0, 0, now + 2 * longest end -- empty, and refilled only when all leases of before are dead

  -- Credits, while the slot they belong to is remembered.
  local credited = lease > 0 and not is_lost and (lease == send or lease == pend)
  if credited then
    local out = lease == send and oc or op
    out = spent < out and out - spent or 0
    if unspent > out then unspent = out end
    out, level = out - unspent, level + unspent
    if lease == send then
      oc = out
    else
      op = out
      if oc + op > cap then
        -- More is out than the present may hold while others are missing, whose shares begin once leases of before can be dead: so
        -- it is not renewed.
        credited = carry == 0
      else
        if carry > op then carry = op end
        op, oc = op - carry, oc + carry
      end
    end
  end
  if refund == RESET then
    level, fraction, ts = capacity, 0, now
  elseif refund > 0 then
    level = level + (refund < capacity and refund or capacity)
  end
  local room = cap - oc - op
  if level >= room then level, fraction = max(0, room), 0 end

  local delay = 0
  if leaky and rate > 0 then delay = muldiv(max(0, capacity - level), period, rate) end
  local left = level
  --+ serve
  level, oc = left - granted, oc + granted
  if served + granted > 0 then version = version + 1 end

  local cost = worst > 0 and worst or 1
  local retry = -1
  if r > 0 and cost <= cap then
    retry = level >= cost and 0 or retry_after(cost, r, unit, cap, longest, send, oc, op, level, fraction, ts)
  end
  local reset = 0
  if rate > 0 and level < capacity then
    local p = (capacity - level) * period + rate - 1
    if p <= MOST then -- nearly always: time_for without its call
      p = p - fraction
      reset = p / rate
      reset = reset - reset % 1
      if reset * rate > p then reset = reset - 1 end
    else
      reset = time_for(capacity - level, rate, period, fraction)
    end
    if ts > now then reset = ts - now + reset end
    if reset > MOST then reset = MOST end
  end

  local us = (reset < TWENTY_YEARS and reset or TWENTY_YEARS) + 2 * longest + 1000000
  --+ keep
  local as = lost + pend + oc + op + missing > 0 and BUCKET_WHOLE or BUCKET_STATE
  text = pack(as, BUCKET, born, version, exp, aend, ac, ap, length, send, level, fraction, ts, unit, lost, pend, oc, op, missing, fleet)
  local lease_slot, life, remaining, out = send, send + length - now - 1, level, oc + op
  --+ answer
end
--+ write
