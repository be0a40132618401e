//go:build !race

package tierlimit

const raceEnabled = false
