--[[
counts.lua: lists of counts, each as narrow as the greatest of them needs. It is put between the prelude and a script that
keeps such a list.
--]]
local formats = {}

-- The format of n counts of so many bytes each.
local function counts_format(n, width)
  local f = formats[n * 8 + width]
  if not f then
    f = '<' .. string.rep('I' .. width, n)
    formats[n * 8 + width] = f
  end
  return f
end

-- The bytes that a count needs.
local function width_of(count)
  local width = 1
  while count >= 256 do count, width = count / 256, width + 1 end
  return width
end

-- A state of this layout: so many bytes, of which the last is the width of the counts that follow. nil as in bucket.lua: what is not ours
-- counts as missing.
local function with_counts(text, layout, bytes)
  if not text or byte(text) ~= layout or #text < bytes then return nil end
  local width = byte(text, bytes)
  return width > 0 and width < 8 and (#text - bytes) % width == 0 and text or nil
end
