package local

// Crowd makes the cell spread its lease over stripes.
func (c *Cell) Crowd() { c.stripes.Store(new(stripes)) }

// Striped says whether it does.
func (c *Cell) Striped() bool { return c.stripes.Load() != nil }
