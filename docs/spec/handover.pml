/*
 * The outage shares of a fixed window and their hand-over (docs/guarantees.md, G5; docs/decisions/0002): a share counts until its
 * window is over, so what is kept aside for it stays aside until its instance has told the key what it admitted. README.md says
 * what is modelled, how each part corresponds to the code, and how to run it.
 *
 * Time is counted in ticks and kept relative to now, as in exchange.pml. When a beat can run is outage.pml's: here a beat runs
 * when it is sent, or not at all, and either its answer arrives or nobody hears of it.
 */
#ifndef N
#define N 2      /* members */
#endif
#ifndef L
#define L N      /* limit */
#endif
#ifndef W
#define W 2      /* ticks of the window */
#endif
#define H 1      /* of a heartbeat */
#define T 1      /* of the remote timeout */

#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define CEIL(a, b) (((a) + (b) - 1) / (b))

#define ALIVE (2 * H)
#define VIEW (H + T)
#ifdef MUTANT_SILENCE_TOO_SHORT
#define SILENCE (ALIVE + VIEW)
#else
#define SILENCE (ALIVE + VIEW + 1) /* its millisecond matters: a share of a window is there at once */
#endif
#define HORIZON (2 * W)
#define NEVER (HORIZON + 1)
#define OLD MAX(ALIVE + W, SILENCE)
#define MANY (2 * N)               /* returns in one episode: there are no more */
#ifdef INFLIGHT
#define V (N + 1)
#else
#define V N
#endif

#define SHARE(v, i) ((v) / N + ((i) < (v) % N -> 1 : 0))                                    /* tier.Share */
#define RESERVED(v, m) ((m) <= 0 -> (v) : ((m) >= N -> 0 : MAX(0, (v) - (m) * CEIL(v, N)))) /* tier.Reserved */

byte rest = W;             /* of the window */

/* ---- the key at the store ---- */

byte count;
byte told;                 /* hand-overs in its episode (REP) */
byte knows;                /* the most returns that an exchange of its episode knew of */
byte lag = 2;              /* how many episodes ago its own is; 2: more, or none */

/* ---- the membership record; sizes of the fleet are N throughout ---- */

byte last[N];              /* since each member was heard */
byte from, until = NEVER, returned;

/* ---- views: the latest of each member; with INFLIGHT one of before, which a call on its way carries ---- */

byte vleft[V], vmissing[V], vfrom[V], vuntil[V], vreturned[V];
byte vlag[V];              /* its episode is the one before */

/* ---- members ---- */

byte act[N];               /* the share may be used: the window began after it did */
byte used[N];              /* what the share has admitted in this window, as its cell knows */
byte owes[N];              /* BackSent is not back: a hand-over is due, */
byte later[N];             /* in the episode before */
byte ready[N], own[N];     /* BackReady, BackOwn */

/* ---- the observer: what was admitted in this window, whoever admitted it ---- */

byte admitted;
#ifdef REACH_HANDOVER
byte handed;
#define admit(n) admitted = admitted + (n)
#else
#define admit(n) admitted = admitted + (n); assert(admitted <= L)
#endif

byte q;                    /* a choice within one step, 0 between steps */
hidden byte o, n, w, before, missing, dark, was, start;
hidden int key0, key1;

/* membership.lua without joins, losses and the dead */
inline beat(i) {
	before = 0; missing = 0; dark = 0;
	was = last[i] > ALIVE;
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
	last[i] = 0; act[i] = 0;
	if
	:: before > 0 ->
		dark = MIN(W, dark - ALIVE);
		if
		:: until <= HORIZON -> from = MAX(from, dark)
		:: else -> /* another episode */
			from = dark; returned = 0;
			if
			:: lag == 0 -> lag = 1
			:: else -> lag = 2; told = 0; knows = 0
			fi;
			w = 0;
			do
			:: w < V -> vlag[w] = (vleft[w] > 0); w++
			:: else -> break
			od;
			w = 0;
			do
			:: w < N -> later[w] = owes[w]; w++
			:: else -> break
			od
		fi;
		until = 0
	:: else
	fi;
	if
	:: was -> returned++
	:: else
	fi
}

/* The end of beat in fleet.go: WasMissing sets back. */
inline answer(i) {
	vleft[i] = VIEW + 1; vmissing[i] = missing; vfrom[i] = from; vuntil[i] = MIN(W, until); vreturned[i] = returned; vlag[i] = 0;
#ifndef MUTANT_HANDED_OVER_IN_ANOTHER_EPISODE
	if
	:: later[i] -> owes[i] = 0
	:: else
	fi;
#endif
	later[i] = 0;
	if
	:: was -> owes[i] = 1
	:: else
	fi;
#ifndef MUTANT_READY_KEPT
	if
	:: owes[i] == 0 -> ready[i] = 0; own[i] = 0
	:: else
	fi
#endif
}

/* set_aside in prelude.lua and fixed_window.lua, with view i; leaves what there is room for in o. */
inline exchange(i, back, mine) {
	if
	:: lag != vlag[i] -> lag = vlag[i]; told = 0; knows = 0
	:: else
	fi;
	if
	:: back -> told++; count = count + mine
	:: else
	fi;
#ifdef MUTANT_RETURNS_FORGOTTEN
	knows = vreturned[i];
#else
	knows = MAX(knows, vreturned[i]);
#endif
	start = W - rest;
	o = L;
	if
	:: start <= vfrom[i] && (vmissing[i] > 0 || vuntil[i] <= start) ->
#ifdef MUTANT_SHARE_FORGOTTEN_ON_RETURN
		o = RESERVED(L, vmissing[i])
#else
		o = MAX(0, RESERVED(L, vmissing[i]) + RESERVED(L, MAX(0, knows - told)) - L)
#endif
	:: else
	fi;
	o = MAX(0, o - count)
}

/* Members with equal shares are interchangeable: of the states that differ only in their order one is kept. */
#define swap(f, i, j) n = f[i]; f[i] = f[j]; f[j] = n
#define KEY(i) (last[i] + 8*(vleft[i] + 4*(vmissing[i] + 4*(vfrom[i] + 4*(vuntil[i] + 4*(vreturned[i] + 8*(vlag[i] + 2*(used[i] + 4*(owes[i] + 2*(later[i] + 2*(act[i] + 2*(ready[i] + 2*own[i]))))))))))))
#define order(i, j) key0 = KEY(i); key1 = KEY(j); if :: key0 > key1 -> swap(last, i, j); swap(vleft, i, j); swap(vmissing, i, j); swap(vfrom, i, j); swap(vuntil, i, j); swap(vreturned, i, j); swap(vlag, i, j); swap(used, i, j); swap(owes, i, j); swap(later, i, j); swap(act, i, j); swap(ready, i, j); swap(own, i, j) :: else fi
inline settle() {
#if L % N == 0
	order(0, 1);
#if N == 3
	order(1, 2); order(0, 1);
#endif
#endif
	skip
}

#define FEW (last[_pid] <= ALIVE || returned < MANY || until > HORIZON)

active [N] proctype member() {
	do
	/* A beat runs and is answered. */
	:: atomic { FEW ->
		if
		:: true
#ifdef INFLIGHT
		:: vleft[_pid] > 0 -> q = 1
#endif
		fi;
		d_step {
#ifdef INFLIGHT
			if
			:: q == 1 ->
				vleft[N] = vleft[_pid]; vmissing[N] = vmissing[_pid]; vfrom[N] = vfrom[_pid];
				vuntil[N] = vuntil[_pid]; vreturned[N] = vreturned[_pid]; vlag[N] = vlag[_pid]
			:: else
			fi;
#endif
			beat(_pid); answer(_pid);
			q = 0; settle() } }
	/* A beat runs, nobody hears of it. */
	:: d_step { FEW -> beat(_pid); settle() }
	/* shareLocked in fallback.go */
	:: d_step { act[_pid] && used[_pid] < SHARE(L, _pid) ->
		used[_pid]++; admit(1);
#ifndef MUTANT_READY_KEPT
		ready[_pid] = 0; own[_pid] = 0;
#endif
		settle() }
	/* Nobody hears of a beat, which did not run: the share ends all the same. */
	:: d_step { act[_pid] -> act[_pid] = 0; settle() }
	/* The share of another outage is made before it may be used. */
	:: d_step { last[_pid] >= SILENCE && !act[_pid] && (used[_pid] > 0 || ready[_pid]) ->
#ifdef MUTANT_SHARE_MADE_ANEW
		used[_pid] = 0;
#endif
#ifndef MUTANT_READY_KEPT
		ready[_pid] = 0; own[_pid] = 0;
#endif
		settle() }
	/* packShareLocked and landLocked in flight.go: settled first, or the hand-over was refused; */
	:: d_step { owes[_pid] && vleft[_pid] > 0 && !ready[_pid] ->
		ready[_pid] = 1; own[_pid] = used[_pid]; used[_pid] = 0;
		settle() }
#ifdef MUTANT_HANDED_OVER_AGAIN /* its cell was swept */
	:: d_step { !owes[_pid] && vleft[_pid] > 0 && vreturned[_pid] > 0 -> owes[_pid] = 1; settle() }
#endif
	/* handed over, whether or not anybody hears of it. */
	:: d_step { owes[_pid] && vleft[_pid] > 0 ->
		n = (ready[_pid] -> own[_pid] : used[_pid]);
		exchange(_pid, 1, n);
#ifdef REACH_HANDOVER
		handed = handed || n > 0;
#endif
		ready[_pid] = 0; own[_pid] = 0; used[_pid] = 0;
		owes[_pid] = 0; later[_pid] = 0;
		settle() }
	od
}

#define less(v) if :: v > 0 -> v-- :: else fi
#define more(v, top) if :: v < (top) -> v++ :: else fi

active proctype store() {
	do
	/* an exchange with one of the views; a lease of a window dies with it, so that who is served may as well be served at once */
	:: atomic {
		if
		:: vleft[0] > 0
		:: vleft[1] > 0 -> q = 1
#if N == 3
		:: vleft[2] > 0 -> q = 2
#endif
#ifdef INFLIGHT
		:: vleft[N] > 0 -> q = N
#endif
		fi;
		d_step { exchange(q, 0, 0); q = o };
		do
		:: q > 0 -> q--
		:: break
		od;
		true;
		d_step {
			count = count + q; admit(q);
#ifdef REACH_HANDOVER
			assert(!handed || admitted < L);
#endif
			q = 0 } }
	/* the key's time to live is over, or it is evicted in a window in which it was not asked for */
	:: d_step { count == 0 && lag < 2 -> lag = 2; told = 0; knows = 0 }
	/* time passes */
	:: d_step {
		rest--;
		w = 0;
		do
		:: w < N ->
			more(last[w], OLD);
			if
			:: rest == 0 -> act[w] = last[w] >= SILENCE; used[w] = 0; own[w] = 0
			:: else
			fi;
			w++
		:: else -> break
		od;
		if
		:: rest == 0 ->
			rest = W; admitted = 0; count = 0;
#ifdef REACH_HANDOVER
			handed = 0
#endif
		:: else
		fi;
		more(until, NEVER);
		if
		:: until == NEVER -> /* the next darkness is another episode: nothing of this one matters any more */
			from = 0; returned = 0; lag = 2; told = 0; knows = 0;
			w = 0;
			do
			:: w < N ->
#ifndef MUTANT_HANDED_OVER_IN_ANOTHER_EPISODE
				owes[w] = 0; later[w] = 0;
#ifndef MUTANT_READY_KEPT
				ready[w] = 0;
#endif
#endif
				w++
			:: else -> break
			od
		:: else -> more(from, W)
		fi;
		w = 0;
		do
		:: w < V ->
			less(vleft[w]);
			if
			:: vleft[w] == 0 -> vmissing[w] = 0; vfrom[w] = 0; vuntil[w] = 0; vreturned[w] = 0; vlag[w] = 0
			:: else -> more(vuntil[w], W); more(vfrom[w], W)
			fi;
			w++
		:: else -> break
		od;
		settle() }
	od
}
