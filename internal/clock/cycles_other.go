//go:build !(linux && amd64)

package clock

func cycles() uint64 { return 0 }

// steady reports that there is no counter to go by here.
func steady() bool { return false }
