/*
 * The exchange protocol (docs/guarantees.md, G1): a bucket, or with -DWINDOW a fixed window, of which N instances hold leases.
 * README.md says what is modelled, how each part corresponds to the code, and how to run it.
 *
 * Time is counted in ticks and kept relative to now, so that the state space is finite though time has no end: a name, deadline
 * or age is the number of ticks until or since. -DMUTANT_x breaks one rule and must be refuted; -DREACH_x claims that something
 * useful never happens and must be refuted too.
 */
#ifndef N
#define N 2      /* instances that hold leases; any number of others only ask for waiting callers */
#endif
#ifndef B
#define B 3      /* burst of the bucket, limit of the window */
#endif
#define R 1      /* tokens that a bucket makes in a tick */
#ifndef S
#define S 2      /* ticks of a slot; of the window */
#endif

#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define MAX(a, b) ((a) > (b) -> (a) : (b))

/* A slot is named by its end, which here is counted as the ticks until the last lease of it is dead: 0 is a dead one. */
#ifdef MUTANT_LATE_RETURN
#define GRACE S  /* the names of slots are remembered for longer */
#else
#define GRACE 0
#endif
#ifdef WINDOW
#define CURRENT (send + GRACE)
#define LIFE send
#define GRANT skip
#else
#define CURRENT (send + S + GRACE)
#define PREVIOUS (send + GRACE)
#define LIFE (send + S)
#define GRANT oc = oc + q
#endif

/* ---- the key at the store ---- */

byte level = B;          /* tokens left */
byte oc, op;             /* granted in the current and in the previous slot and not reported */
short send = S;          /* end of the current slot; of the window */
bool pend;               /* whether the previous slot has a name */
byte age;                /* since the last exchange */
byte ttl;                /* until the key is forgotten; 0: there is none */

/* ---- the instances ---- */

#define NONE 0
#define REQUEST 1
#define REPLY 2

typedef Instance {
	byte tok;            /* tokens in hand */
	byte live;           /* until they are void */
	byte name;           /* of their slot, 0 where nothing may be claimed */
	byte spent;          /* spent and unreported */
	byte call;           /* what is on its way */
	byte qname, qspent;  /* the lease reported; of a reply, the lease granted */
	byte qback;          /* what of it goes back, */
	bool qgive;          /* or is kept; of a reply, whether what is in hand stays valid */
	byte qtok, qlive     /* the lease granted */
}
Instance x[N];
#define X x[_pid]

/* A call that its instance gave up and that has not run. */
byte zname, zspent, zback;
bool zgive;

/* ---- the observer: what was admitted, whoever admitted it ---- */

byte meter;              /* a bucket that leaks R a tick; of a window, what was admitted in it */
#ifdef REACH_SUSTAINED
byte streak;             /* ticks in a row with full use from leases alone */
#define admit(n) meter = meter + (n)
#else
#define admit(n) meter = meter + (n); assert(meter <= B)
#endif
#ifdef REACH_LEASE
#define leased() assert(meter < B)
#else
#define leased() skip
#endif

byte q;                  /* a choice within one step, 0 between steps */
hidden byte o, k, n, credited, cname, cspent, cback, cgive;
hidden short a;
hidden int key0, key1;

/* ---- the script ---- */

/* refill in bucket.lua */
inline refill(dt) {
	o = MAX(0, B - oc - op);
	if
	:: dt > 0 && level < o -> level = level + (dt) * R
	:: else
	fi;
	if
	:: level > o -> level = o
	:: else
	fi
}

/* advance in bucket.lua; a is the age of the level */
inline advance() {
#ifndef WINDOW
	if
	:: ttl == 0 -> level = B; oc = 0; op = 0; send = S; pend = 0; age = 0
	:: else
	fi;
	a = age;
	do
	:: send <= 0 && oc + op == 0 -> send = S; pend = 0
	:: send <= 0 && oc + op > 0 ->
#ifndef MUTANT_NO_ROLLOVER
		refill(send + a); /* discards what the outstanding tokens forbid, before they are forgotten */
		a = -send;
#endif
		op = oc; oc = 0; pend = 1; send = send + S
	:: else -> break
	od;
#ifndef MUTANT_CREDIT_FIRST
	refill(a);
#endif
	age = 0
#else
	skip
#endif
}

/* the credits of bucket.lua and fixed_window.lua */
inline credit() {
	credited = 0;
	if
	:: cname == 0
	:: cname > 0 && cname == CURRENT ->
		credited = 1;
#ifdef WINDOW
		if
		:: cgive -> level = level + MIN(cback, B - level)
		:: else
		fi
#else
		oc = oc - MIN(cspent, oc);
		if
		:: cgive -> k = MIN(cback, oc); oc = oc - k; level = level + k
		:: else
		fi
	:: cname > 0 && pend && cname == PREVIOUS ->
		credited = 1;
		op = op - MIN(cspent, op);
		k = MIN(cback, op); op = op - k;
		if
		:: cgive -> level = level + k
		:: else -> oc = oc + k /* carried into the current slot */
		fi
#endif
	:: else ->
#ifdef MUTANT_LATE_RETURN
		credited = 1; op = op - MIN(cspent, op);
		if
		:: cgive -> level = MIN(level + cback, B)
		:: else
		fi
#else
		skip
#endif
	fi
#ifndef WINDOW
	;
#ifdef MUTANT_CREDIT_FIRST
	refill(a);
#endif
	o = MAX(0, B - oc - op);
	if
	:: level > o -> level = o
	:: else
	fi
#endif
}

inline stored() {
#ifndef WINDOW
	n = (B - level + R - 1) / R + 2 * S; /* keep in prelude.lua: until full, and two slots */
	ttl = MAX(ttl, n)
#else
	skip
#endif
}

/* ---- what an instance does ---- */

inline forget() {
	X.call = NONE; X.qname = 0; X.qspent = 0; X.qback = 0; X.qgive = 0; X.qtok = 0; X.qlive = 0
}

/* packLeaseLocked in flight.go */
inline pack() {
	X.call = REQUEST;
	if
	:: X.name > 0 -> X.qname = X.name; X.qspent = X.spent
	:: else -> X.qback = 0; X.qgive = 0
	fi;
	X.spent = 0
}

/* unpackLocked in flight.go; a lease that was to go back may here even be spent after all */
inline unpack() {
	if
	:: X.qname > 0 ->
		X.spent = X.spent + X.qspent;
		if
		:: X.qgive -> X.tok = X.tok + X.qback
		:: else
		fi
	:: else
	fi;
	forget()
}

/* lostLocked in flight.go: nothing may be claimed any more */
inline lost() {
#ifdef MUTANT_UNKNOWN_RECLAIMED
	if
	:: X.call == REQUEST -> unpack()
	:: else -> forget(); X.name = 0; X.spent = 0
	fi
#else
	forget(); X.name = 0; X.spent = 0
#endif
}

inline linger() {
	if
	:: X.call == REQUEST && X.qname > 0 -> zname = X.qname; zspent = X.qspent; zback = X.qback; zgive = X.qgive
	:: else
	fi
}

inline script() {
	advance();
	cname = X.qname; cspent = X.qspent; cback = X.qback; cgive = X.qgive;
	credit()
}

/* Instances are interchangeable: of the states that differ only in their order one is kept. */
#define KEY(i) (x[i].tok + 8*(x[i].live + 8*(x[i].name + 8*(x[i].spent + 8*(x[i].call + 4*(x[i].qname + 8*(x[i].qspent + 8*(x[i].qback + 8*(x[i].qtok + 8*x[i].qgive)))))))))
#define swap(f) n = x[0].f; x[0].f = x[1].f; x[1].f = n
inline settle() {
#if N == 2
	key0 = KEY(0); key1 = KEY(1);
	if
	:: key0 > key1 ->
		swap(tok); swap(live); swap(name); swap(spent); swap(call);
		swap(qname); swap(qspent); swap(qback); swap(qgive); swap(qtok); swap(qlive)
	:: else
	fi
#endif
	skip
}

active [N] proctype instance() {
	do
	/* warm in limiter.go: a token of the lease */
	:: d_step { X.tok > 0 && X.live > 0 ->
		X.tok--;
		if
		:: X.name > 0 -> X.spent++
		:: else
		fi;
		admit(1); leased(); settle() }
	/* fly in flight.go: a call is sent with which the lease goes back, */
	:: d_step { X.call == NONE && X.tok + X.spent > 0 ->
		X.qback = X.tok; X.qgive = 1; X.tok = 0;
		pack(); settle() }
	/* or with which what is left is kept */
	:: d_step { X.call == NONE && (X.live > 0 || X.tok == 0) ->
		X.qback = X.tok;
		pack(); settle() }
	/* the script runs and grants a lease of any size */
	:: atomic { X.call == REQUEST ->
		d_step {
			script();
#ifdef MUTANT_CREDIT_RESENT
			linger();
#endif
			X.qgive = credited && !X.qgive && X.qback > 0 };
		do
		:: q < level -> q++
		:: break
		od;
		d_step {
			X.qspent = 0; X.qback = 0;
			level = level - q; GRANT; stored();
			X.call = REPLY; X.qtok = q; X.qname = CURRENT;
#ifdef MUTANT_LEASE_TOO_LONG
			X.qlive = LIFE + S;
#else
			X.qlive = LIFE; /* the latest that "from before the send" allows */
#endif
			q = 0; settle() } }
	/* the script runs, the reply is lost; what it granted is another's burnt lease, below */
	:: d_step { X.call == REQUEST && X.qname > 0 -> script(); stored(); lost(); settle() }
	/* landLocked in flight.go */
	:: d_step { X.call == REPLY ->
		if
#ifdef MUTANT_VOID_KEPT
		:: true
#else
		:: X.qgive
#endif
		:: else -> X.tok = 0; X.spent = 0 /* void under the new slot */
		fi;
		X.tok = X.tok + X.qtok; X.name = X.qname; X.live = X.qlive;
		forget(); settle() }
	/* the call is given up and will not run any more, or has run */
	:: d_step { X.call != NONE -> lost(); settle() }
	/* the call is given up and may yet run */
	:: d_step { X.call == REQUEST && X.qname > 0 && zname == 0 -> linger(); lost(); settle() }
	/* the call certainly did not run: refused, or late */
	:: d_step { X.call == REQUEST -> unpack(); settle() }
	/* the instance is killed, another is started */
	:: d_step { X.call == NONE && X.tok + X.name > 0 ->
		X.tok = 0; X.live = 0; X.name = 0; X.spent = 0; settle() }
	od
}

inline less(v) {
	if
	:: v > 0 -> v--
	:: else
	fi
}

/* What is dead is forgotten: the script would take no credit of it. */
inline pass(i) {
	less(x[i].live); less(x[i].name); less(x[i].qname);
#ifndef MUTANT_FROM_RECEIPT
	less(x[i].qlive);
#endif
	if
	:: x[i].name == 0 ->
		x[i].spent = 0;
		if
		:: x[i].live == 0 -> x[i].tok = 0
		:: else
		fi
	:: else
	fi;
	if
	:: x[i].qname == 0 && x[i].call == REQUEST -> x[i].qspent = 0; x[i].qback = 0; x[i].qgive = 0
	:: x[i].qname == 0 && x[i].call == REPLY && x[i].qlive == 0 -> x[i].qtok = 0; x[i].qgive = 0
	:: else
	fi
}

active proctype store() {
	do
	/* a call that was given up runs after all */
	:: d_step { zname > 0 ->
		advance();
		cname = zname; cspent = zspent; cback = zback; cgive = zgive;
		credit(); stored();
		zname = 0; zspent = 0; zback = 0; zgive = 0 }
	/* a call without credits, sent by anybody, run any number of times: callers who wait are served, or a lease is burnt */
	:: atomic {
		d_step { advance() };
		do
		:: q < level -> q++
		:: break
		od;
		if
		:: d_step {
			level = level - q; admit(q); stored();
#ifdef REACH_SUSTAINED
			streak = 0;
#endif
			q = 0 }
		:: d_step { level = level - q; GRANT; stored(); q = 0 }
		fi }
	/* time passes */
	:: d_step {
#ifdef REACH_SUSTAINED
		streak = (meter == B -> streak + 1 : 0);
		assert(streak < 4);
#endif
		pass(0);
#if N > 1
		pass(1);
#endif
		less(zname);
		if
		:: zname == 0 -> zspent = 0; zback = 0; zgive = 0
		:: else
		fi;
#ifdef WINDOW
		send--;
		if
		:: send == 0 -> send = S; level = B; meter = 0
		:: else
		fi;
#else
		if
		:: ttl > 1 -> ttl--; age++; send--
		:: else -> ttl = 0; age = 0; send = 0; level = 0; oc = 0; op = 0; pend = 0
		fi;
		meter = MAX(0, meter - R);
#endif
		settle() }
	od
}
