package tierlimit

// What the tests of package tierlimit_test need of those of this package.
const RaceEnabled = raceEnabled

var EnvelopeOf = envelopeOf

var ErrResetKept, ErrResetUnknown = errResetKept, errResetUnknown
