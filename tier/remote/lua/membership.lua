--[[
membership.lua: one instance's sign of life, and what the fleet knows of itself.

KEYS[1]    zset "<prefix>1:{<g>}!beats": id -> last heartbeat, µs of server time
KEYS[2]    zset "<prefix>1:{<g>}!joins": id -> number of the beat with which it joined; the rank is the place in it
KEYS[3]    hash "<prefix>1:{<g>}!fleet": beats (count), last (time of the last beat, µs), up (beats came without a gap
           since, µs), lost_at (last proven loss of data, µs), change (counter), most, fleet, from (µs), until (µs),
           episode (when it began, µs), returned, least: the darkness; horizon (µs for which it is remembered); acked (up to which
           beat's answer all members have heard, at least); lost_beat (number of the beat that proved the last loss);
           "ack:<id>": the number of a beat up to whose answer one member can hold no older view; made (when the record was
           begun, µs); expected (members before the last loss, 0 once that is long ago), came (how many of them were heard
           since, or were not lost): the others are ghosts; n (members)
ARGV       1 fence       latest server time at which the call may run, µs; 0: whenever
           2 op          beat | peek (reads only, no sign of life) | leave | change (drop kept denials)
           3 id          random, one per instance
           4 heartbeat   interval of the beats, µs
           5 dead        a member not heard for this long is forgotten, µs
           6 horizon     µs
           7 remembered  count of beats in the last answer heard, 0: none. It is also the acknowledgement: that a member
                         was heard does not say that it heard of who joined
           8 members     n in that answer, 0: none
           9 least       the smaller of fleet and least in that answer
          10 since       when it was given, µs; while a darkness was remembered, when that began
Reply      17 integers: now, late, n, rank (-1: no member), ready (1: nobody can still use a share that has not made room
           for this one), missing, most, fleet, from, until, episode, returned, was_missing, beats, lost_at, change,
           least (n and missing include ghosts)
Clock      server TIME, read once       Cost  O(log n): ZADD, ZCARD, ZCOUNT, ZRANGE, ZRANK, HMGET, HSET; after a join, until all
           have heard of it, O(64) on average and O(n) at worst
TTL        a day, or twice the horizon where that is longer
Delivery   a beat that comes late is no sign of life: the fence. Beats may repeat; "change" may repeat
--]]
local MOST = 9007199254740991
local DAY, TEN_YEARS = 86400000000, 315360000000000
local LOOK = 64 -- members that are looked at per beat, on average, while not all have heard of the last join
local floor, max, min, format = math.floor, math.max, math.min, string.format
local key_beats, key_joins, key_fleet = KEYS[1], KEYS[2], KEYS[3]
local op, id = ARGV[2], ARGV[3]

if #KEYS ~= 3 or #ARGV ~= 10 then return redis.error_reply('ERR tierlimit membership wants 3 keys and 10 arguments') end
if op ~= 'beat' and op ~= 'peek' and op ~= 'leave' and op ~= 'change' then
  return redis.error_reply('ERR tierlimit membership knows beat, peek, leave and change')
end
local number = {}
for i = 1, 10 do
  local n = tonumber(ARGV[i])
  if i ~= 2 and i ~= 3 and (not n or n ~= floor(n) or n < 0 or n > MOST) then
    return redis.error_reply('ERR tierlimit membership argument ' .. i .. ' is no integer in range')
  end
  number[i] = n
end
local fence, heartbeat, dead, horizon, remembered = number[1], number[4], number[5], number[6], number[7]
local members, told, since = number[8], number[9], number[10]

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if fence > 0 and now > fence then
  return {now, 1, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
end

local function text(n) return format('%.0f', n + 0) end

-- A record of another type is none of ours.
local foreign = false
local function ours(key, kind)
  local t = redis.call('TYPE', key)
  t = type(t) == 'table' and t.ok or t
  if t ~= kind and t ~= 'none' then foreign = true end
  return t == kind
end
local has_beats, has_joins, has_fleet = ours(key_beats, 'zset'), ours(key_joins, 'zset'), ours(key_fleet, 'hash')
local got = {}
if has_fleet then
  got = redis.call('HMGET', key_fleet, 'beats', 'last', 'up', 'lost_at', 'change', 'most', 'fleet', 'from', 'until',
    'episode', 'returned', 'horizon', 'acked', 'lost_beat', 'made', 'expected', 'came', 'least', 'n')
end
-- Three keys are one record: what is left of it when some were evicted or deleted would count members twice, or for ever as missing,
-- or not at all. It is lost as a whole then.
local whole = not foreign and has_beats == has_joins and (has_fleet or not has_beats)
if whole and has_fleet and not has_beats and (tonumber(got[19] or nil) or 0) > 0 then whole = false end
if not whole then
  if op == 'peek' then return {now, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} end
  redis.call('DEL', key_beats, key_joins, key_fleet)
  got = {}
end
local function field(i) return tonumber(got[i] or nil) or 0 end
local known = tonumber(got[1] or nil) ~= nil
local beats, last, up, lost_at, change = field(1), field(2), field(3), field(4), field(5)
local most, fleet, from, until_, episode, returned = field(6), field(7), field(8), field(9), field(10), field(11)
horizon = max(horizon, field(12))
local acked, lost_beat = field(13), field(14)
local made, expected, came = field(15), field(16), field(17)
-- fleet is the least size of the fleet on which the share of a member may be based that is missing now, or that goes missing;
-- least is what fleet was at its least while somebody was missing, for as long as that darkness is remembered.
local least = got[18] and field(18) or fleet
if not known then made = now end

local alive_since = now - 2 * heartbeat
local function card() return redis.call('ZCARD', key_beats) end
local function alive() return redis.call('ZCOUNT', key_beats, text(alive_since), '+inf') end
local function first(key, reverse)
  local r = redis.call(reverse and 'ZREVRANGE' or 'ZRANGE', key, 0, 0, 'WITHSCORES')
  return tonumber(r[2] or nil)
end
-- Who was there before a loss and was not heard since may be using its share.
local function ghosts() return max(0, expected - came) end
local function store()
  redis.call('HSET', key_fleet, 'beats', text(beats), 'last', text(last), 'up', text(up), 'lost_at', text(lost_at),
    'change', text(change), 'most', text(most), 'fleet', text(fleet), 'from', text(from), 'until', text(until_),
    'episode', text(episode), 'returned', text(returned), 'horizon', text(horizon), 'acked', text(acked), 'lost_beat', text(lost_beat),
    'made', text(made), 'expected', text(expected), 'came', text(came), 'least', text(least), 'n', text(card()))
  local px = text(min(TEN_YEARS, max(DAY, 2 * horizon)) / 1000)
  redis.call('PEXPIRE', key_fleet, px)
  redis.call('PEXPIRE', key_beats, px)
  redis.call('PEXPIRE', key_joins, px)
end
local function answer(missing, was_missing, ready)
  local rank = redis.call('ZRANK', key_joins, id) or -1
  return {now, 0, card() + ghosts(), rank, ready and 1 or 0, missing, most, fleet, from, until_, episode, returned,
    was_missing and 1 or 0, beats, lost_at, change, least}
end

if op == 'peek' then return answer(card() - alive() + ghosts(), false, false) end
if op == 'leave' then
  redis.call('ZREM', key_beats, id)
  redis.call('ZREM', key_joins, id)
  redis.call('HDEL', key_fleet, 'ack:' .. id)
  fleet = min(fleet, card() + ghosts())
  store()
  return answer(card() - alive() + ghosts(), false, false)
end
if op == 'change' then
  change = change + 1
  store()
  return answer(card() - alive() + ghosts(), false, false)
end

-- Memory lost: somebody remembers more beats than are recorded, or was heard before the record was begun.
local joined = tonumber(redis.call('ZSCORE', key_joins, id) or nil)
local returns = remembered > 0 and not joined
local lost = remembered > 0 and (not known or beats < remembered or returns and members > 0 and expected == 0 and made > since)
if lost then
  lost_at = now
  beats = max(beats, remembered)
  lost_beat = beats + 1
  if not known or made <= since then came = card() end -- the record it knew, with fewer beats: who is in it is no ghost
end
if returns then came = came + 1 end
-- What it remembers of the fleet stands in for what was lost.
local recalls = members > 0 and (lost or returns and expected > 0)
if recalls then expected = max(expected, members) end
beats = beats + 1
if last == 0 or now - last > 2 * heartbeat then up = now end
last = now

-- The dead are forgotten, but only after the others have been heard without a gap for as long: while Redis was away nobody
-- could be heard.
if now - up >= dead then
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', key_beats, '-inf', '(' .. text(now - dead))) do
    redis.call('ZREM', key_beats, gone)
    redis.call('ZREM', key_joins, gone)
    redis.call('HDEL', key_fleet, 'ack:' .. gone)
    if gone == id then joined = nil end
  end
  if now - lost_at >= dead then expected = 0 end
end

local n_before = card()
local missing_before = n_before - alive() + ghosts()
local oldest = first(key_beats) or now
local mine = tonumber(redis.call('ZSCORE', key_beats, id) or nil)
local was_missing = mine ~= nil and mine < alive_since
if recalls and returns and since < alive_since then
  was_missing = true
  missing_before = missing_before + 1
end
redis.call('ZADD', key_beats, text(now), id)
local rejoins = remembered > 0 and not joined
if not joined then
  joined = max(beats, (first(key_joins, true) or 0) + 1)
  beats = joined
  redis.call('ZADD', key_joins, text(joined), id)
  -- Who has heard nothing yet will hear of all that joined before. Who has, and was forgotten since, may still go by that; if it
  -- was another record's, it says nothing of this one's members.
  local ack = remembered >= lost_beat and remembered or 0
  if remembered == 0 then ack = joined - 1 end
  redis.call('HSET', key_fleet, 'ack:' .. id, text(ack))
  acked = min(acked, ack)
elseif remembered >= joined then
  redis.call('HSET', key_fleet, 'ack:' .. id, text(remembered))
end
local n = card()
local missing = n - alive() + ghosts()
-- Somebody joined of whom not everybody has heard, or a loss was proven since, as far as is recorded: look. In a large fleet not at each
-- beat, or a deployment of all would cost the square of their number: until somebody looks, what is recorded stands, which is never more.
local last_join = first(key_joins, true)
local news = max(last_join, lost_beat)
local others = MOST
if acked < news and n > LOOK and beats % floor(n / LOOK) > 0 then
  others = acked
elseif acked < news then
  local ids = redis.call('ZRANGE', key_beats, 0, -1)
  local own = 0
  for at = 1, #ids, 512 do
    local names = {}
    for i = at, min(at + 511, #ids) do names[#names + 1] = 'ack:' .. ids[i] end
    local acks = redis.call('HMGET', key_fleet, unpack(names))
    for i = 1, #names do
      local ack = tonumber(acks[i] or nil) or 0
      if ids[at + i - 1] == id then own = ack else others = min(others, ack) end
    end
  end
  acked = max(acked, min(own, others))
end
local confirmed = acked >= last_join
-- A ghost's share is no part of those that the members make room for.
local ready = ghosts() == 0 and (confirmed or others >= joined)

local dark = max(missing_before, missing)
--[[
Every member's share is based on fleet members or more. When fleet is set to n below, all members hold a view that is no older
than the last join (and than the last loss); since then members can only have gone, so that those views said n or more. A view
given later says what n is then, and fleet is never above that, nor does it rise until all have acknowledged the joins. Who goes
missing keeps the view it had; while it is missing, fleet does not rise. Who was forgotten and is back goes by an old view until
it acknowledges another.
--]]
local all = n + ghosts()
fleet = fleet > 0 and min(fleet, all) or all
if recalls then fleet = max(1, min(fleet, told)) end
if rejoins and members > 0 then fleet = min(fleet, members) end
if dark == 0 and acked >= news then fleet = n end

local remembers = until_ > 0 and now - until_ <= horizon
if dark > 0 then
  local begin = oldest + 2 * heartbeat
  -- Ghosts were heard two heartbeats before the answer that one of them remembers, or were missing in it.
  if recalls then begin = min(begin, since) elseif ghosts() > 0 then begin = min(begin, from) end
  if remembers then
    most, from, least = max(most, dark), min(from, begin), min(least, fleet)
  else
    -- Another number than any in a record that was lost.
    episode, most, from, returned, least = max(episode + 1, now), dark, begin, 0, fleet
  end
  until_ = now
elseif not remembers then
  least = fleet
end
if was_missing then returned = returned + 1 end
store()
return answer(missing, was_missing, ready)
