/*
 * The outage shares of a bucket (docs/guarantees.md, G4 and G5): N members beat, go missing, use their shares and return one by
 * one, while exchanges carry what some view said of the fleet. README.md says what is modelled, how each part corresponds to the
 * code, and how to run it.
 *
 * Time is counted in ticks and kept relative to now, as in exchange.pml. An age that has stopped mattering stays where it is.
 */
#ifndef N
#define N 2      /* members */
#endif
#ifndef B
#define B 2      /* burst */
#endif
#ifndef R
#define R 2      /* tokens a tick */
#endif
#define S 1      /* ticks of a slot */
#define H 1      /* of a heartbeat */
#define T 1      /* of the remote timeout */
#ifndef K
#define K 1      /* views in use at once, whoever holds them */
#endif

#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define CEIL(a, b) (((a) + (b) - 1) / (b))

#define ALIVE (2 * H)    /* aliveBeats: who was heard within it is not missing */
#define VIEW (H + T)     /* viewFor */
#ifdef UNLEASED
#define LEASES 0
#else
#define LEASES (2 * S)   /* decisions/0001 */
#endif
#if defined(MUTANT_SILENCE_TOO_SHORT)
#define SHORTER 1
#elif defined(MUTANT_LEASES_NOT_WAITED_FOR)
#define SHORTER LEASES
#else
#define SHORTER 0
#endif
#define SILENCE (ALIVE + VIEW + LEASES - SHORTER) /* silenceBefore in fallback.go, without its millisecond */

#define FILL CEIL(B, R)
#define HORIZON MAX(FILL, ALIVE)
#define NEVER (MAX(FILL + 2 * S, HORIZON) + 1)
#define OLD (ALIVE + FILL)

#ifdef MUTANT_SHARES_ROUNDED_UP
#define SHARE(v, i) CEIL(v, N)
#else
#define SHARE(v, i) ((v) / N + ((i) < (v) % N -> 1 : 0))                                    /* tier.Share */
#endif
#define RESERVED(v, m) ((m) <= 0 -> (v) : ((m) >= N -> 0 : MAX(0, (v) - (m) * CEIL(v, N)))) /* tier.Reserved */

/* ---- the key at the store, and its leases, whoever holds them ---- */

byte level;
byte oc, op;             /* granted in the current and in the previous slot and not reported, */
byte tc, tp;             /* and what of it is in hand */
short send;              /* end of the current slot */
byte age;                /* since the last exchange */
byte dm;                 /* members missing as of it */
byte ttl;                /* until the key is forgotten; 0: there is none */

/* ---- the membership record; sizes of the fleet are N throughout ---- */

byte last[N];            /* since each member was heard */
byte most, from, until = NEVER;

/* ---- views: what a beat was answered, and for how long an exchange that carries it may run ---- */

byte vleft[K], vmissing[K], vmost[K], vfrom[K], vuntil[K];

/* ---- members ---- */

byte wait[N] = SILENCE;  /* until its share begins */
byte stock[N];           /* of its share */
byte beats[N];           /* until a beat that was not answered can run no more */

/* ---- the observer: what was admitted, whoever admitted it ---- */

byte meter;              /* a bucket that leaks R a tick */
#if defined(REACH_SHARE) || defined(REACH_RETURN)
#define admit(n) meter = meter + (n)
#else
#define admit(n) meter = meter + (n); assert(meter <= B)
#endif

byte q;                  /* a choice within one step, 0 between steps */
hidden byte o, n, w, before, missing, dark;
hidden short a, rate, cap, dt;
hidden int key0, key1;

/* ---- the exchange ---- */

inline top() {
	o = MAX(0, cap - oc - op);
	if
	:: level > o -> level = o
	:: else
	fi
}

inline refill() {
	o = MAX(0, cap - oc - op);
	if
	:: dt > 0 && level < o -> level = level + dt * rate
	:: else
	fi;
	top()
}

/* To the time that was ago; a is the age of the level. */
inline advance(ago) {
	do
	:: send <= -(ago) && oc + op == 0 -> send = S - (ago)
	:: send <= -(ago) && oc + op > 0 ->
		dt = send + a; refill();
		a = -send;
		op = oc; oc = 0; tp = tc; tc = 0; send = send + S
	:: else -> break
	od;
	dt = a - (ago); refill();
	if
	:: dt > 0 -> a = ago
	:: else
	fi
}

/* The part of settle_bucket in bucket.lua that comes before the credits; of view i. */
inline bring(i) {
	if
	:: ttl == 0 ->
		oc = 0; op = 0; tc = 0; tp = 0; send = S; dm = 0;
#ifdef MUTANT_FORGOTTEN_KEY_FULL
		level = B; a = 0
#else
		level = MAX(0, B - FILL * R);
		a = FILL;
		if
		:: a > vuntil[i] && a > vfrom[i] -> dt = a - vfrom[i]; rate = R; cap = B; refill(); a = vfrom[i]
		:: else
		fi
#endif
	:: else -> a = age
	fi;
#ifndef MUTANT_DARKNESS_FORGOTTEN
	if
	:: a > vuntil[i] ->
		rate = RESERVED(R, vmost[i]); cap = RESERVED(B, vmost[i]);
		advance(vuntil[i]);
		dm = vmissing[i]
	:: else
	fi;
#endif
	rate = MIN(RESERVED(R, dm), RESERVED(R, vmissing[i]));
	cap = MIN(RESERVED(B, dm), RESERVED(B, vmissing[i]));
	advance(0);
	dm = vmissing[i];
	age = 0;
#ifndef LOST_REPORTS
	oc = tc; op = tp; /* everybody reports what was spent; exchange.pml has what may go wrong with that */
#endif
	cap = RESERVED(B, dm); top()
}

inline stored() {
	n = CEIL(B - level, R) + 2 * S;
	ttl = MAX(ttl, n)
}

/* ---- the beat: membership.lua without joins, losses and the dead ---- */

inline beat(i) {
	before = 0; missing = 0; dark = 0;
	w = 0;
	do
	:: w < N ->
		if
		:: last[w] > ALIVE -> before++; missing = missing + (w != i -> 1 : 0)
		:: else
		fi;
		dark = MAX(dark, last[w]);
		w++
	:: else -> break
	od;
	last[i] = 0;
#ifdef MUTANT_SELF_NOT_MISSING
	before = missing;
#endif
	if
	:: before > 0 ->
		dark = dark - ALIVE;
		if
		:: until <= HORIZON -> most = MAX(most, before); from = MAX(from, dark)
		:: else -> most = before; from = dark
		fi;
		until = 0
	:: else
	fi
}

/* Members with equal shares are interchangeable, and so are views: of the states that differ only in their order one is kept. */
#define swap(f, i, j) n = f[i]; f[i] = f[j]; f[j] = n
#define KEY(i) (last[i] + 16 * (wait[i] + 16 * (stock[i] + 8 * beats[i])))
#define VKEY(i) (vleft[i] + 8 * (vmissing[i] + 8 * (vmost[i] + 8 * (vfrom[i] + 16 * vuntil[i]))))
#define order(i, j) key0 = KEY(i); key1 = KEY(j); if :: key0 > key1 -> swap(last, i, j); swap(wait, i, j); swap(stock, i, j); swap(beats, i, j) :: else fi
#define vorder(i, j) key0 = VKEY(i); key1 = VKEY(j); if :: key0 > key1 -> swap(vleft, i, j); swap(vmissing, i, j); swap(vmost, i, j); swap(vfrom, i, j); swap(vuntil, i, j) :: else fi
inline settle() {
#if B % N == 0 && R % N == 0
	order(0, 1);
#if N == 3
	order(1, 2); order(0, 1);
#endif
#endif
#if K == 2
	vorder(0, 1);
#endif
	skip
}

active [N] proctype member() {
	do
	/* A beat runs and is answered; somebody uses the view, or nobody does. Who is not due to beat may be killed, hung or cut off. */
	:: atomic {
		do
		:: q < K -> q++
		:: break
		od;
		true;
		d_step {
			beat(_pid);
#ifdef MUTANT_OLD_BEAT_FORGOTTEN
			wait[_pid] = SILENCE;
#else
			wait[_pid] = SILENCE + MAX(0, beats[_pid] - 1); /* one of before may yet run */
#endif
#ifndef MUTANT_STOCK_KEPT
			stock[_pid] = 0;
#endif
			if
			:: q < K -> vleft[q] = VIEW + 1; vmissing[q] = missing; vmost[q] = most; vfrom[q] = from; vuntil[q] = until
			:: else
			fi;
			q = 0; settle() } }
	/* A beat is sent that will not be answered in time. It is a sign of life from now until its fence. */
	:: d_step { beats[_pid] == 0 ->
		beats[_pid] = T + 1;
#if !defined(MUTANT_SHARE_NOT_PAUSED) && !defined(MUTANT_DOUBT_FORGOTTEN)
		wait[_pid] = SILENCE + T; stock[_pid] = 0;
#endif
		settle() }
	/* It runs, perhaps again. */
	:: d_step { beats[_pid] > 0 -> beat(_pid); settle() }
	/* shareLocked in fallback.go */
	:: d_step { wait[_pid] == 0 && stock[_pid] > 0 ->
		stock[_pid]--; admit(1);
#ifdef REACH_SHARE
		assert(meter < B || wait[0] + wait[1] > 0);
#endif
		settle() }
	od
}

#define less(v) if :: v > 0 -> v-- :: else fi
#define more(v, top) if :: v < (top) -> v++ :: else fi
#ifdef MUTANT_VIEW_NOT_FENCED
#define less_view(v) if :: v > 1 -> v-- :: else fi
#else
#define less_view(v) less(v)
#endif

active proctype store() {
	do
	/* a token of a lease is spent */
	:: d_step { tc > 0 -> tc--; admit(1) }
	:: d_step { tp > 0 -> tp--; admit(1) }
	/* an exchange with one of the views: tokens go back or are carried, callers are served, leases granted */
	:: atomic {
		if
		:: vleft[0] > 0
#if K == 2
		:: vleft[1] > 0 -> q = 1
#endif
		fi;
		d_step { bring(q); q = 0 };
#ifndef UNLEASED
		do
#ifdef LOST_REPORTS
		:: oc > tc -> oc--
		:: op > tp -> op--
#endif
		:: tc > 0 -> tc--; oc--; level++
		:: tp > 0 -> tp--; op--; level++
#ifdef MUTANT_CARRIED_ABOVE_THE_CAP
		:: tp > 0 -> tp--; op--; tc++; oc++
#else
		:: tp > 0 && oc + op <= RESERVED(B, dm) -> tp--; op--; tc++; oc++
#endif
		:: break
		od;
		true;
		d_step { cap = RESERVED(B, dm); top() };
#endif
		do
		:: q < level -> q++
		:: break
		od;
		true;
		d_step {
			level = level - q; admit(q);
#ifdef REACH_RETURN
			assert(meter < B || dm > 0 || until == NEVER);
#endif
			q = 0 };
#ifndef UNLEASED
		do
		:: q < level -> q++
		:: break
		od;
		true;
		d_step { level = level - q; oc = oc + q; tc = tc + q };
#endif
		d_step { stored(); q = 0 } }
	/* time passes */
	:: d_step {
		w = 0;
		do
		:: w < N ->
			if
			:: wait[w] == 0 -> stock[w] = MIN(SHARE(B, w), stock[w] + SHARE(R, w))
			:: else ->
				wait[w]--;
#ifdef MUTANT_SHARE_STARTS_FULL
				stock[w] = (wait[w] == 0 -> SHARE(B, w) : 0)
#endif
			fi;
#ifdef MUTANT_SHARE_NOT_PAUSED
			if
			:: beats[w] == 1 -> wait[w] = SILENCE; stock[w] = 0 /* it is given up, and its fence is past */
			:: else
			fi;
#endif
#ifndef MUTANT_BEAT_NOT_FENCED
			less(beats[w]);
#endif
			more(last[w], OLD);
			w++
		:: else -> break
		od;
		more(until, NEVER);
		if
		:: until == NEVER -> most = 0; from = 0
		:: else -> more(from, FILL)
		fi;
		w = 0;
		do
		:: w < K ->
			less_view(vleft[w]);
			if
			:: vleft[w] == 0 -> vmissing[w] = 0; vmost[w] = 0; vfrom[w] = 0; vuntil[w] = 0
			:: else ->
				more(vuntil[w], NEVER);
				if
				:: vuntil[w] == NEVER -> vmost[w] = 0; vfrom[w] = 0
				:: else -> more(vfrom[w], FILL)
				fi
			fi;
			w++
		:: else -> break
		od;
		send--;
		if
		:: send <= 0 -> tp = 0 /* its leases are dead, whether or not the script has been there */
		:: else
		fi;
		if
		:: send <= -S -> tc = 0
		:: else
		fi;
		if
		:: ttl > 1 -> ttl--; age++
		:: else -> ttl = 0; age = 0; send = 0; level = 0; oc = 0; op = 0; dm = 0; tc = 0; tp = 0
		fi;
		meter = MAX(0, meter - R);
		settle() }
	od
}
