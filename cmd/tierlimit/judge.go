package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tierlimit/tierlimit"
	"github.com/tierlimit/tierlimit/internal/envelope"
	"github.com/tierlimit/tierlimit/internal/fleet"
)

// errNothing says that a run gave the checker nothing to judge: that is not a limit that was kept.
var errNothing = errors.New("no check was made, so there is nothing to judge")

// judge prints the checker's verdict of a run, and returns errBroken if more was admitted than the limit allows. history
// is the run's, in the server's clock.
func judge(ctx context.Context, s *screen, l tierlimit.Limit, r *fleet.Result, history []envelope.Admission) error {
	if r.Checks == 0 {
		return errNothing
	}
	v := envelope.Check(fleet.Envelope(l), history)
	s.linef("checker: %d admissions held against %v in every interval of the whole run", len(history), l)
	if v.Overshoot > 0 {
		s.linef("%s, overshoot %d: %d admitted in the %v from %.3fs on", s.paint(red, "verdict: BROKEN"), v.Overshoot,
			v.Admitted, time.Duration(v.To-v.From).Round(time.Microsecond), time.Duration(v.From-r.Started).Seconds())
		return errBroken
	}
	s.linef("%s, overshoot 0", s.paint(green, "verdict: kept"))
	if r.Errors > 0 && ctx.Err() == nil { // who was waiting when the run was interrupted got an error
		return fmt.Errorf("%d checks returned an error", r.Errors)
	}
	return nil
}
