package redistest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Mode is what a Proxy does to the bytes that pass. A mode applies to the
// connections there are as well as to new ones.
type Mode int

// Swallowed bytes are gone: TCP cannot deliver later ones without them, so the
// connections that lost some are reset once the direction passes again. Held
// bytes are delivered once it passes, also when the client has given up and
// closed in between: that is how a healed network lets Redis execute calls
// that timed out long ago.
const (
	Pass         Mode = iota
	Refuse            // the listener is closed, connections are reset
	Reset             // connections are accepted and reset
	BlackHole         // connections are accepted, all bytes are swallowed
	CutRequests       // bytes to the server are swallowed
	CutReplies        // bytes to the client are swallowed: requests are executed
	Hold              // all bytes are held
	HoldRequests      // bytes to the server are held
	HoldReplies       // bytes to the client are held
)

var modeNames = [...]string{"pass", "refuse", "reset", "black hole", "cut requests", "cut replies", "hold", "hold requests", "hold replies"}

// String returns the mode's name in words.
func (m Mode) String() string {
	if m < 0 || int(m) >= len(modeNames) {
		return fmt.Sprintf("mode %d", int(m))
	}
	return modeNames[m]
}

// Delay is added to all bytes of a direction: Latency plus a random part below
// Jitter. It keeps their order and does not limit throughput.
type Delay struct{ Latency, Jitter time.Duration }

// dir is a direction of a connection.
type dir int

const (
	requests dir = iota // client to server
	replies             // server to client
)

type action int

const (
	pass action = iota
	hold
	drop
)

func (m Mode) action(d dir) action {
	switch {
	case m == BlackHole, m == CutRequests && d == requests, m == CutReplies && d == replies:
		return drop
	case m == Hold, m == HoldRequests && d == requests, m == HoldReplies && d == replies:
		return hold
	}
	return pass
}

// maxLinks bounds a proxy's goroutines, four per connection; further
// connections are reset.
const maxLinks = 4096

// Proxy is a TCP proxy that breaks on command. Methods are safe for concurrent
// use. Its client sees a server that cannot be reached as a connection that is
// accepted and then reset, since a proxy cannot refuse for another.
type Proxy struct {
	host string
	port int

	mu      sync.Mutex
	target  string
	mode    Mode
	from    map[string]Mode // by the client's IP, in place of mode
	changed chan struct{}   // closed and replaced when a mode changes
	delay   [2]Delay
	lose    int
	words   [][]byte
	ln      net.Listener // nil while refusing
	links   map[*link]struct{}
	closed  bool

	lost atomic.Int64
	wg   sync.WaitGroup
}

// StartProxy puts a proxy in front of target and closes it when the test ends.
func StartProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	p, err := OpenProxy(target)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(p.Close)
	return p
}

// OpenProxy is StartProxy for programs that are not tests; the caller calls
// Close.
func OpenProxy(target string) (*Proxy, error) { return openProxy("127.0.0.1", target) }

func openProxy(host, target string) (*Proxy, error) {
	p := &Proxy{
		host:    host,
		target:  target,
		from:    map[string]Mode{},
		changed: make(chan struct{}),
		links:   map[*link]struct{}{},
	}
	var err error
	for range 5 { // another process may be faster between the two steps
		if p.port, err = reservePort(host, false); err != nil {
			return nil, err
		}
		if err = p.listenLocked(); err == nil {
			return p, nil
		}
		releasePort(host, p.port)
	}
	return nil, err
}

// Addr is the address to dial instead of the server's.
func (p *Proxy) Addr() string { return net.JoinHostPort(p.host, strconv.Itoa(p.port)) }

// Options returns go-redis options like a Server's, for the proxy's address.
func (p *Proxy) Options() *redis.Options { return Options(p.Addr()) }

// SetMode changes the mode. It fails only when it leaves Refuse and the port
// cannot be listened on again, or after Close.
func (p *Proxy) SetMode(m Mode) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errors.New("redistest: proxy is closed")
	}
	if p.mode == m {
		return nil
	}
	if m == Refuse {
		_ = p.ln.Close()
		p.ln = nil
	} else if p.ln == nil {
		if err := p.listenLocked(); err != nil {
			return err
		}
	}
	p.mode = m
	p.changedLocked()
	return nil
}

// SetModeFrom puts connections from one client IP into a mode of their own:
// with a loopback address per node, a cut between two nodes. Pass ends it.
// Refuse is like Reset here.
func (p *Proxy) SetModeFrom(ip string, m Mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m == Pass {
		delete(p.from, ip)
	} else {
		p.from[ip] = m
	}
	p.changedLocked()
}

// SetTarget leads new connections to another server.
func (p *Proxy) SetTarget(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = addr
}

// SetDelay delays the bytes read from now on, in each direction.
func (p *Proxy) SetDelay(toServer, toClient Delay) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = [2]Delay{toServer, toClient}
}

// ResetConns resets all connections there are.
func (p *Proxy) ResetConns() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.kill(true)
	}
}

// LoseReplies loses the replies of the next n requests: each is forwarded and
// executed, then its connection is reset instead of being answered. A pipeline
// written at once counts as one request. With words, only requests that contain
// one of them count (in any case: "evalsha"); without, all but those that set
// up a connection. It replaces what was left of an earlier call; 0 ends it.
func (p *Proxy) LoseReplies(n int, words ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose, p.words = n, nil
	for _, w := range words {
		p.words = append(p.words, bytes.ToLower([]byte(w)))
	}
}

// Lost returns how many requests have been executed without their reply being
// delivered, by LoseReplies.
func (p *Proxy) Lost() int { return int(p.lost.Load()) }

// Conns returns the number of open connections.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Close resets all connections and waits for the proxy's goroutines.
func (p *Proxy) Close() {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		if p.ln != nil {
			_ = p.ln.Close()
		}
		for l := range p.links {
			l.kill(true)
		}
		releasePort(p.host, p.port)
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *Proxy) listenLocked() error {
	ln, err := net.Listen("tcp", p.Addr())
	if err != nil {
		return err
	}
	p.ln = ln
	p.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				if errors.Is(err, net.ErrClosed) {
					return
				}
				time.Sleep(time.Millisecond) // out of descriptors: wait for some
				continue
			}
			p.admit(ln, c.(*net.TCPConn))
		}
	})
	return nil
}

func (p *Proxy) admit(ln net.Listener, c *net.TCPConn) {
	l := &link{p: p, ip: c.RemoteAddr().(*net.TCPAddr).IP.String(), client: c}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.modeLocked(l)
	// A connection that was accepted just before the listener closed belongs
	// to the time after it.
	if p.closed || p.ln != ln || m == Refuse || m == Reset || len(p.links) >= maxLinks {
		l.kill(true)
		return
	}
	p.links[l] = struct{}{}
	p.wg.Go(func() {
		l.run()
		p.mu.Lock()
		delete(p.links, l)
		p.mu.Unlock()
	})
}

func (p *Proxy) modeLocked(l *link) Mode {
	if m, ok := p.from[l.ip]; ok {
		return m
	}
	return p.mode
}

// changedLocked applies the modes to the connections there are.
func (p *Proxy) changedLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
	for l := range p.links {
		m := p.modeLocked(l)
		for d := range l.torn {
			if l.torn[d] && m.action(dir(d)) != drop {
				l.kill(true)
			}
		}
		if m == Refuse || m == Reset {
			l.kill(true)
		}
	}
}

// gate waits while d is held, and returns whether bytes may pass. If not, the
// link is marked as torn in the same critical section: a mode change sees
// either no loss or the mark.
func (p *Proxy) gate(l *link, d dir) bool {
	for {
		p.mu.Lock()
		act, changed := p.modeLocked(l).action(d), p.changed
		if act == drop {
			l.torn[d] = true
		}
		torn := l.torn[d]
		p.mu.Unlock()
		if act != hold {
			return !torn
		}
		select {
		case <-changed:
		case <-l.ctx.Done():
			return false
		}
	}
}

// loses reports whether the reply to this request is to be lost.
func (p *Proxy) loses(req []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lose <= 0 {
		return false
	}
	req = bytes.ToLower(req)
	hit := false
	for _, w := range p.words {
		hit = hit || bytes.Contains(req, w)
	}
	if len(p.words) == 0 {
		hit = !setsUp(req)
	}
	if hit {
		p.lose--
	}
	return hit
}

// setsUp reports whether req, in lower case, begins with a command that clients
// send on their own when they connect.
func setsUp(req []byte) bool {
	parts := bytes.SplitN(req, []byte("\r\n"), 4) // *N, $len, name
	if len(parts) < 4 || !bytes.HasPrefix(req, []byte("*")) {
		return false
	}
	switch string(parts[2]) {
	case "hello", "auth", "client", "select", "readonly", "cluster", "command":
		return true
	}
	return false
}

// link is one connection through the proxy. Each direction has a reader, which
// stamps what it reads with the time it is due, and a writer, which waits for
// that time and for the gate: so a latency delays bytes without spacing them.
type link struct {
	p      *Proxy
	ip     string
	client *net.TCPConn
	server atomic.Pointer[net.TCPConn] // nil until the first bytes pass
	ctx    context.Context             // ends with the link
	cancel context.CancelFunc
	once   sync.Once
	torn   [2]bool     // has lost bytes; under p.mu
	armed  atomic.Bool // the next reply is to be lost

	wmu  sync.Mutex // writes to the server; not taken by kill, for they may block
	mute bool       // no more requests: the reply is being lost
}

// chunk is what one read returned; the last of a stream has an error only.
type chunk struct {
	data []byte
	due  time.Time
	err  error
}

// run carries requests, and replies once there is a server. The server is
// dialed for the first bytes that may pass, so that connections made while
// nothing passes work afterwards.
func (l *link) run() {
	defer l.kill(false)
	var wg sync.WaitGroup
	defer wg.Wait()
	in := make(chan chunk, 64)
	wg.Go(func() { l.read(l.client, requests, in) })
	for c := range l.chunks(in) {
		if !l.p.gate(l, requests) {
			continue
		}
		s := l.server.Load()
		if s == nil && c.err == nil {
			var err error
			if s, err = l.dial(); err != nil {
				l.kill(true)
				return
			}
			wg.Go(func() { l.reply(s) })
		}
		if s == nil {
			break
		}
		if err := l.forward(s, c); err != nil {
			l.kill(true)
			return
		}
	}
	if l.server.Load() == nil {
		l.kill(false) // the client has left before anybody else knew of it
	}
	// Otherwise the server's side decides when the link ends: a client that
	// has closed may still have requests there, or its end was swallowed.
}

func (l *link) dial() (*net.TCPConn, error) {
	l.p.mu.Lock()
	target := l.p.target
	l.p.mu.Unlock()
	d := net.Dialer{Timeout: 5 * time.Second}
	c, err := d.DialContext(l.ctx, "tcp", target)
	if err != nil {
		return nil, err
	}
	s := c.(*net.TCPConn)
	l.server.Store(s)
	// kill ends ctx before it looks for a server: either it sees this one, or
	// ctx has ended here.
	if l.ctx.Err() != nil {
		_ = s.Close()
		return nil, l.ctx.Err()
	}
	return s, nil
}

// forward passes a chunk of requests, or their end, on to the server.
func (l *link) forward(s *net.TCPConn, c chunk) error {
	if c.err != nil && !errors.Is(c.err, io.EOF) {
		return c.err
	}
	// Armed before the write: the reply may be there before Write returns.
	if c.err == nil && l.p.loses(c.data) {
		l.armed.Store(true)
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.mute {
		return nil
	}
	if c.err != nil {
		return s.CloseWrite()
	}
	_, err := s.Write(c.data)
	return err
}

// reply carries replies until either side or the link ends.
func (l *link) reply(s *net.TCPConn) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.kill(false)
	in := make(chan chunk, 64)
	wg.Go(func() { l.read(s, replies, in) })
	for c := range l.chunks(in) {
		if c.err == nil && l.armed.Load() {
			l.loseReply(s, in)
			return
		}
		if !l.p.gate(l, replies) {
			if c.err != nil {
				<-l.ctx.Done() // the server's end is swallowed like its bytes
			}
			continue
		}
		if c.err != nil {
			l.kill(!errors.Is(c.err, io.EOF))
			return
		}
		if _, err := l.client.Write(c.data); err != nil {
			l.kill(true)
			return
		}
	}
}

// loseReply resets the client's connection once the server has executed all it
// was sent. The first bytes of a reply do not prove that: a pipeline's other
// commands, or an earlier request's, may be unread in the server's buffer, and
// a reset would discard them. After a half-close the server works off what it
// has and closes, so its end of stream is the proof, with no protocol to parse.
func (l *link) loseReply(s *net.TCPConn, in <-chan chunk) {
	l.wmu.Lock()
	l.mute = true
	_ = s.CloseWrite()
	l.wmu.Unlock()
	for c := range l.chunks(in) {
		if c.err != nil {
			break
		}
	}
	l.p.lost.Add(1) // before the reset, so that who sees that sees this
	l.kill(true)
}

// read sends what it reads to out until the stream or the link ends.
func (l *link) read(from *net.TCPConn, d dir, out chan<- chunk) {
	defer close(out)
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		due := l.p.due(d)
		if n > 0 && !l.send(out, chunk{data: bytes.Clone(buf[:n]), due: due}) {
			return
		}
		if err != nil {
			l.send(out, chunk{due: due, err: err})
			return
		}
	}
}

func (l *link) send(out chan<- chunk, c chunk) bool {
	select {
	case out <- c:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// due returns when bytes read now are to be written; zero is at once.
func (p *Proxy) due(d dir) time.Time {
	p.mu.Lock()
	dl := p.delay[d]
	p.mu.Unlock()
	wait := dl.Latency
	if dl.Jitter > 0 {
		wait += rand.N(dl.Jitter)
	}
	if wait <= 0 {
		return time.Time{}
	}
	return time.Now().Add(wait)
}

// chunks yields each chunk when it is due, until the stream or the link ends.
func (l *link) chunks(in <-chan chunk) iter.Seq[chunk] {
	return func(yield func(chunk) bool) {
		for {
			var c chunk
			var ok bool
			select {
			case c, ok = <-in:
			case <-l.ctx.Done():
			}
			if !ok {
				return
			}
			if wait := time.Until(c.due); !c.due.IsZero() && wait > 0 {
				t := time.NewTimer(wait)
				select {
				case <-t.C:
				case <-l.ctx.Done():
					t.Stop()
					return
				}
			}
			if l.ctx.Err() != nil || !yield(c) {
				return
			}
		}
	}
}

// kill ends the link, with RST rather than FIN if reset. It never blocks.
func (l *link) kill(reset bool) {
	l.once.Do(func() {
		l.cancel()
		for _, c := range []*net.TCPConn{l.client, l.server.Load()} {
			if c == nil {
				continue
			}
			if reset {
				_ = c.SetLinger(0)
			}
			_ = c.Close()
		}
	})
}
