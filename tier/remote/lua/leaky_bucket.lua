--[[
leaky_bucket.lua: as token_bucket.lua, seen as a queue that leaks: the level of the token bucket is the room left in it.

KEYS[i]    string; fields as in bucket.lua
ARGV[1]    a header; policies: 5 numbers; for each key an ask: 7, a report: 8 if it has one, and pairs, as in token_bucket.lua
Reply      now, late, then per key 15 numbers, as in token_bucket.lua; delay µs is when the first token of this
           grant is due, the following ones a period/rate apart
Clock      server TIME, read once       Cost  O(1) per key: MGET of all, SET
TTL        time to empty + 2 slots + 1 s
Delivery   debits may run twice; credits (spent, carry, unspent, refund) at most once
--]]
local leaky = true
