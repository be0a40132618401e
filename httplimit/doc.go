// Package httplimit is net/http middleware around a [tierlimit.Limiter]. It fits whatever takes a
// func(http.Handler) http.Handler: ServeMux, chi, and with an adapter of a few lines gin and echo.
//
//	m, err := httplimit.New(api, httplimit.ClientIP(httplimit.TrustedProxies("10.0.0.0/8")))
//	mux.Handle("GET /items/{id}", m.Handler(items))
//
// A request is counted by its [Key]; it is denied with 429, Retry-After and a problem body, and is told how it stands by
// RateLimit-Policy and RateLimit, the fields of draft-ietf-httpapi-ratelimit-headers. Nothing that a request says goes into a response
// or an error. The ResponseWriter is passed on as it came, so that http.ResponseController, Flusher and Hijacker work.
package httplimit
