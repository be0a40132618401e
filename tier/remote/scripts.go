package remote

import (
	"sync"

	"github.com/tierlimit/tierlimit/tier"
	"github.com/tierlimit/tierlimit/tier/remote/lua"
)

// embedded returns the scripts of package lua with their digests.
var embedded = sync.OnceValue(func() *scripts {
	known := func(body string) script { return script{sha: lua.SHA(body), body: body} }
	s := &scripts{membership: known(lua.Membership())}
	for alg := 1; alg <= tier.Algorithms; alg++ {
		s.exchange[alg] = known(lua.Source(tier.Algorithm(alg)))
	}
	return s
})
