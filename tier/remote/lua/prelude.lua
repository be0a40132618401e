--[[
prelude.lua: what the five exchange scripts share. It is put before each of them.

KEYS[i]    the key of ask i; what it holds is said in each script
ARGV[1]    a header of 10 numbers; policies of 5 numbers each, the limits that the keys of this call have; then for each key an
           ask of 7, a report of 8 if it has one, and pairs of 2: first those of the report's spends, then those of the
           ask's needs. Their names are in token_bucket.lua. A number is 7 bytes, lowest first, 0..2^53-1, or 1 or 2 bytes
           where a format below says so. Not text, since reading and writing numbers as text, one argument each, took two
           thirds of the time that the server spent on a call.
  1 fence      latest server time at which the call may run, µs; 0: whenever
  2 missing    members not heard lately
  3 most       the most missing at once within the horizon
  4 fleet      the least fleet size on which the share of a member missing now may be based
  5 from       darkness began at or after this server time, µs
  6 until      last server time at which somebody was missing, µs; 0: never
  7 episode    number of the episode of darkness
  8 returned   members that came back from missing in this episode
  9 least      the least fleet size on which a share in this episode may have been based
 10 policies   their count
Reply      one string of such numbers: now, late (1: TIME was past the fence, nothing was done, nothing follows), then 15 per
           key, some of which are left out (answer below says which); -1 is 7 bytes of ones
Clock      server TIME, read once
--]]
local MOST = 9007199254740991
local HEADER = '<I7I7I7I7I7I7I7I7I7I1' -- formats of struct, a library that every Redis has: little-endian, 7 bytes a number
local POLICY = '<I7I7I7I7I7'
local ASK = '<I1I1I2I7I7I7I7'
local REPORT = '<I7I7I7I7I7I7I1I2'
local PAIR = '<I7I7'
local REPLY_HEADER = '<I7I1'
local REPLY = '<I1I7I7I7I7I7I7I7I7I7'
local REPLY_WHOLE = '<I1I7I7I7I7I7I7I7I7I7I7I7I7I7I7'
local HEADER_BYTES, POLICY_BYTES, ASK_BYTES, REPORT_BYTES, PAIR_BYTES = 64, 35, 32, 45, 14
local RESET = MOST -- as a refund: make full
local TWENTY_YEARS = 631152000000000

local max, min, unpack = math.max, math.min, unpack
local format, byte = string.format, string.byte

-- A fault found before anything is written.
local function fault(what)
  return redis.error_reply('ERR tierlimit ' .. what)
end

-- struct in Lua, for a server that has none (the embedded one of demos and tests), or whose long is of 32 bits.
local struct = rawget(_G, 'struct')
if not struct or struct.unpack('<I7', '\0\0\0\0\0\0\1') ~= 281474976710656 then
  local char, known = string.char, {}
  local function widths(as)
    local list = known[as]
    if not list then
      list = {}
      for width in string.gmatch(as, '%d') do list[#list + 1] = tonumber(width) end
      known[as] = list
    end
    return list
  end
  struct = {
    unpack = function(as, text, at)
      local numbers, list = {}, widths(as)
      for i = 1, #list do
        local last = at + list[i] - 1
        local a, b, c, d, e, f, g = byte(text, at, last)
        numbers[i] = a + (b or 0) * 256 + (c or 0) * 65536 + (d or 0) * 16777216 +
          ((e or 0) + (f or 0) * 256 + (g or 0) * 65536) * 4294967296
        at = last + 1
      end
      numbers[#list + 1] = at
      return unpack(numbers)
    end,
    pack = function(as, ...)
      local parts, numbers, list = {}, {...}, widths(as)
      for i = 1, #list do
        local n = numbers[i]
        local high = n / 4294967296
        high = high - high % 1
        local low = n - high * 4294967296
        local b, c, d, f, g = low / 256, low / 65536, low / 16777216, high / 256, high / 65536
        local seven = char(low % 256, (b - b % 1) % 256, (c - c % 1) % 256, d - d % 1, high % 256, (f - f % 1) % 256,
          (g - g % 1) % 256)
        parts[i] = list[i] == 7 and seven or string.sub(seven, 1, list[i])
      end
      return table.concat(parts)
    end,
  }
end
local read, pack = struct.unpack, struct.pack

-- a / b rounded down. The division of two integers below 2^53 can round up to the next integer.
local function idiv(a, b)
  local q = a / b
  q = q - q % 1
  if q * b > a then q = q - 1 end
  return q
end

-- a * b / c rounded down, and the remainder, exactly; a quotient above 2^53-1 is that, with remainder 0.
-- The product of the two remainders is built from base 4 digits, since 7 * 1e15 is the most that stays exact.
local function muldiv(a, b, c)
  local p = a * b
  if p <= MOST then
    local q = p / c -- as idiv, without its call
    q = q - q % 1
    if q * c > p then q = q - 1 end
    return q, p - q * c
  end
  local q = 0
  if a >= c then
    local k = idiv(a, c)
    a = a - k * c
    if k > MOST / b then return MOST, 0 end
    q = k * b
  end
  if b >= c then
    local k = idiv(b, c)
    b = b - k * c
    if a > 0 and k > MOST / a then return MOST, 0 end
    q = q + k * a
    if q > MOST then return MOST, 0 end
  end
  local power = 1
  while power * 4 <= b do power = power * 4 end
  local high, r = 0, 0
  while power >= 1 do
    local digit = idiv(b, power)
    b = b - digit * power
    local t = r * 4 + a * digit
    local k = idiv(t, c)
    r = t - k * c
    high = high * 4 + k
    power = power / 4
  end
  q = q + high
  if q > MOST then return MOST, 0 end
  return q, r
end

-- The shortest time after which need tokens are made at rate per period, when fraction/period of one is there.
local function time_for(need, rate, period, fraction)
  if need <= 0 then return 0 end
  local p = need * period + rate - 1
  if p <= MOST then
    p = p - fraction
    local q = p / rate
    q = q - q % 1
    return q * rate > p and q - 1 or q
  end
  -- need * period - fraction as (need - 1) * period and a rest: the whole product may not fit where the difference does.
  local q, r = muldiv(need - 1, period, rate)
  q = q + idiv(r + period - fraction + rate - 1, rate)
  return q < MOST and q or MOST
end

-- What is left of x while m of n members may each use their share of it.
local function reserved(x, m, n)
  if m <= 0 then return x end
  if n < 1 or m >= n then return 0 end
  return max(0, x - m * idiv(x + n - 1, n))
end

-- The header and the numbers of all keys, checked before anything is written: those of a key when its turn comes, and what keys will
-- hold is written when all had theirs. To read them twice took 0.5 µs a key.
local keys, data = KEYS, ARGV[1]
if #keys < 1 or #ARGV ~= 1 or #data < HEADER_BYTES then return fault('wants keys and one argument') end
local stop = #data + 1
local fence, missing, most, fleet, from, until_, episode, returned, least, count, policies_at = read(HEADER, data, 1)
if max(fence, missing, most, fleet, from, until_, episode, returned, least) > MOST then
  return fault('header: a number out of range')
end
local after = policies_at + count * POLICY_BYTES
if after > stop then return fault('policies are missing') end

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if fence > 0 and now > fence then return pack(REPLY_HEADER, now, 1) end

-- What the keys hold, read at once: a call of a command costs more than what it does. Then what they will hold, written at the end.
local states = redis.call('MGET', unpack(keys))
local stored = #keys > 1 and {} -- by key, since one may come again in this call
local expiries, expires, expiry = {}, 0, ''
local replies = {pack(REPLY_HEADER, now, 0)}
local last_policy, rate, period, capacity, sub, slot, _ = -1, 0, 0, 0, 0, 0
