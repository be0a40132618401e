// Package grpclimit limits the rates of gRPC calls: interceptors for unary calls and streams, on servers and on clients, over the
// limiters of package tierlimit.
//
// An Interceptor knows a Limiter for each method, service, or for everything, and a Key that says whose call it is: by method, metadata,
// client address, verified certificate, or what a function of yours returns. A call above its limit ends with the code ResourceExhausted,
// a RetryInfo that says when to come again, and a QuotaFailure that names the limiter. No key and no data of a request is in any
// status, header or log.
//
// It is a module of its own, so that the core never raises the gRPC version of those who do without it.
package grpclimit
