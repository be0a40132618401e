package grpclimit

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// A Call is what a Key, a cost and a skip function are told of a call.
type Call struct {
	// FullMethod is "/pkg.Service/Method", always with the leading slash.
	FullMethod string

	// Message is the request of a unary call, or the message that a stream received or is about to send. It is nil at the opening
	// of a stream. It must not be changed or kept.
	Message any

	// Client says that this is the calling side.
	Client bool

	// Target is what the client's connection was made for, as given to grpc.NewClient; "" on a server.
	Target string
}

// A Key says whose call it is. Two calls with the same key and the same Limiter share a count. Where a call has
// none, WithMissingKey decides. It is asked for each call, and for each message of a stream that is counted,
// so it has to be quick; it is called by many goroutines at once.
type Key interface {
	// Of returns the key of a call, any bytes. With ok false, or a key of no bytes, it has none.
	Of(ctx context.Context, c Call) (key string, ok bool)
}

// KeyFunc makes a function a Key: for what an interceptor before this one put into the context, for a field of the request
// (Call.Message), or for other keys by method. A nil one is a fault that New lists.
type KeyFunc func(ctx context.Context, c Call) (key string, ok bool)

// Of calls f. A nil f has no key.
func (f KeyFunc) Of(ctx context.Context, c Call) (string, bool) {
	if f == nil {
		return "", false
	}
	return f(ctx, c)
}

// A checked key knows what is wrong with how it was made: New asks, so that making one neither panics nor returns an error.
type checked interface{ faults() []string }

func keyFaults(k Key) []string {
	switch k := k.(type) {
	case nil:
		return []string{"a Key is nil"}
	case KeyFunc:
		if k == nil {
			return []string{"a KeyFunc is nil"}
		}
	case checked:
		return k.faults()
	}
	return nil
}

func keyOf(ctx context.Context, k Key, c Call) (string, bool) {
	if k == nil {
		return "", false
	}
	return k.Of(ctx, c)
}

type everyoneKey struct{}

// Everyone is one key for all calls: what a Limiter counts is then the sum of all callers and of all methods it is for.
func Everyone() Key { return everyoneKey{} }

func (everyoneKey) Of(context.Context, Call) (string, bool) { return "everyone", true }

type methodKey struct{}

// Method counts each method apart, whoever calls: the key is Call.FullMethod. It is never missing. Behind a grpc.UnknownServiceHandler
// callers make names up, each of which is a key of its own.
func Method() Key { return methodKey{} }

func (methodKey) Of(_ context.Context, c Call) (string, bool) { return c.FullMethod, true }

type targetKey struct{}

// Target is for clients: the key is what the connection was made for. It is missing on a server.
func Target() Key { return targetKey{} }

func (targetKey) Of(_ context.Context, c Call) (string, bool) { return c.Target, c.Target != "" }

type metadataKey struct{ name string }

// Metadata takes the value of a metadata entry, of the incoming metadata on a server and the outgoing on a client. Upper and lower case
// of the name are one; ":authority" works, too, on a server. A name that metadata cannot have is a fault that New lists.
//
// The key is missing where the value is absent or empty, and where there are several: else a caller could add one and choose which
// counts. Callers choose their metadata, so a value limits only those who cannot make up another: check it before this
// interceptor, or Join it with ClientIP.
func Metadata(name string) Key { return metadataKey{strings.ToLower(name)} }

func (k metadataKey) Of(ctx context.Context, c Call) (string, bool) {
	values := metadataValues(ctx, c, k.name)
	if len(values) != 1 || values[0] == "" {
		return "", false
	}
	return values[0], true
}

func metadataValues(ctx context.Context, c Call, name string) []string {
	if !c.Client {
		return metadata.ValueFromIncomingContext(ctx, name)
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	return md.Get(name)
}

func (k metadataKey) faults() []string {
	name := strings.TrimPrefix(k.name, ":")
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return []string{fmt.Sprintf("metadata cannot have the name %q", k.name)}
		}
	}
	if name == "" {
		return []string{fmt.Sprintf("metadata cannot have the name %q", k.name)}
	}
	return nil
}

type authKey struct {
	identity func(credentials.AuthInfo) (string, bool)
}

// Auth is who the peer's TLS certificate says it is, as CertificateIdentity reads it. Only a certificate that TLS has verified against
// the server's ClientCAs counts; without one, without TLS, and on a client the key is missing. Where something else verifies
// certificates (a VerifyPeerCertificate of your own with tls.RequireAnyClientCert, as go-spiffe sets), and for other transports, use
// AuthFunc.
func Auth() Key { return authKey{verifiedIdentity} }

// AuthFunc is who identity says the peer is, from what the transport's credentials found out. It is not called, and the key is missing,
// where there is no AuthInfo: on a connection without credentials, and on a client. A nil identity is a fault that New lists.
func AuthFunc(identity func(info credentials.AuthInfo) (id string, ok bool)) Key {
	return authKey{identity}
}

func (k authKey) Of(ctx context.Context, c Call) (string, bool) {
	// A client's context may be that of the call it serves, whose peer is somebody else.
	if c.Client || k.identity == nil {
		return "", false
	}
	p, ok := peer.FromContext(ctx)
	if !ok || p.AuthInfo == nil {
		return "", false
	}
	return k.identity(p.AuthInfo)
}

func (k authKey) faults() []string {
	if k.identity == nil {
		return []string{"the function of AuthFunc is nil"}
	}
	return nil
}

func verifiedIdentity(info credentials.AuthInfo) (string, bool) {
	t, ok := info.(credentials.TLSInfo)
	// Unverified, anybody can write anything into a certificate.
	if !ok || len(t.State.VerifiedChains) == 0 || len(t.State.VerifiedChains[0]) == 0 {
		return "", false
	}
	return CertificateIdentity(t.State.VerifiedChains[0][0])
}

// CertificateIdentity is the name in a certificate: its SPIFFE ID, else its common name, else its first DNS name, as "spiffe://...",
// "cn:..." and "dns:...", so that no kind can be taken for another. It is false where there is none of them, for nil, and
// for a certificate with more than one URI of the scheme spiffe, which SPIFFE forbids. It verifies nothing: that is for the caller to have
// done. Certificates of different authorities may carry the same name.
func CertificateIdentity(cert *x509.Certificate) (id string, ok bool) {
	if cert == nil {
		return "", false
	}
	for _, u := range cert.URIs {
		if u == nil || !strings.EqualFold(u.Scheme, "spiffe") {
			continue
		}
		if id != "" {
			return "", false
		}
		id = u.String()
	}
	switch {
	case id != "":
	case cert.Subject.CommonName != "":
		id = "cn:" + cert.Subject.CommonName
	case len(cert.DNSNames) > 0 && cert.DNSNames[0] != "":
		id = "dns:" + cert.DNSNames[0]
	}
	return id, id != ""
}

type joinKey []Key

// Join makes one key of several: calls share a count only if all parts are equal. Parts are prefixed by their lengths, so that
// two different lists never make the same key. It is missing where any part is, or has no bytes. No parts, and a nil one, are faults that New lists.
func Join(keys ...Key) Key { return joinKey(slices.Clone(keys)) }

func (k joinKey) Of(ctx context.Context, c Call) (string, bool) {
	joined := make([]byte, 0, 128)
	for _, part := range k {
		v, ok := keyOf(ctx, part, c)
		if !ok || v == "" {
			return "", false
		}
		joined = appendPart(joined, v)
	}
	return string(joined), len(k) > 0
}

// appendPart appends v so that where it ends does not depend on what follows: the length in decimal, a colon, v.
func appendPart(to []byte, v string) []byte {
	to = strconv.AppendInt(to, int64(len(v)), 10)
	to = append(to, ':')
	return append(to, v...)
}

func (k joinKey) faults() []string { return listFaults("Join", k) }

type firstKey []Key

// First is the first of several keys that is not missing, nor of no bytes: the account of those who have one, else the address. Its place in the list is
// part of the key, so that nobody's account can be named like somebody's address. It is missing where all are. No keys, and a nil
// one, are faults that New lists.
func First(keys ...Key) Key { return firstKey(slices.Clone(keys)) }

func (k firstKey) Of(ctx context.Context, c Call) (string, bool) {
	for i, one := range k {
		if v, ok := keyOf(ctx, one, c); ok && v != "" {
			return strconv.Itoa(i) + ":" + v, true
		}
	}
	return "", false
}

func (k firstKey) faults() []string { return listFaults("First", k) }

func listFaults(verb string, keys []Key) []string {
	if len(keys) == 0 {
		return []string{verb + " has no keys"}
	}
	var out []string
	for _, k := range keys {
		out = append(out, keyFaults(k)...)
	}
	return out
}
