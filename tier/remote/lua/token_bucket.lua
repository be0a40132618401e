--[[
token_bucket.lua: settle what instances spent of token buckets and lease them more. Put before bucket.lua.

KEYS[i]    string; fields as in bucket.lua
ARGV[1]    a header; policies: 5 numbers; for each key an ask: 7, a report: 8 if it has one, and pairs; widths and ranges as
           in prelude.lua
  policy   1 rate          tokens per period, 0..1e15      report   1 own      unused
           2 period        µs, 1..10 years                          2 lease    slot of the lease reported, 0: none
           3 capacity      burst, 0..1e15                           3 spent    tokens of it spent since the last report
           4 sub           1                                        4 carry    unspent, kept
           5 slot          µs                                       5 unspent  handed back
  ask      1 policy        which of them, from 1                    6 refund   given back by callers; 2^53-1: make full
           2 reports       1: with one; 2: want whole               7 back     unused
           3 needs         pairs (cost, count) of callers           8 spends   pairs (age µs, count); unused
           4 known_born    incarnation known, 0: none
           5 known_version grant number known
           6 seen          activity slot of the last exchange
           7 want          tokens wanted as a lease
Reply      now, late, then per key 15 numbers: flags (1: lost, 2: credited, 4: whole), served, slot, life µs, remaining,
           retry µs (-1: never), reset µs, activity, version, ttl µs, and if whole lease, out, active, born, delay µs (0)
Clock      server TIME, read once       Cost  O(1) per key: MGET of all, SET
TTL        time to full + 2 slots + 1 s: an expired key and a full bucket are the same
Delivery   debits may run twice; credits (spent, carry, unspent, refund) at most once
--]]
local leaky = false
