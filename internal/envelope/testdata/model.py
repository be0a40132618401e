"""Writes model.json: small point histories and what three sweeps, written apart from the Go checker, say of them.

    python3 model.py > model.json

Each case: kind, rate per period (ticks), burst, the admissions [tick, tokens], and the worst admitted - allowed (negative
when there was room). The sweeps are a leaky meter, a two-pointer window and a count per window.
"""
import json
import random
from collections import defaultdict


def worst_curve(adm, B, r):
    """max over closed [x,y] of A[x..y] - (B + r*(y-x))"""
    level, last, best = 0, None, -10**9
    for t in sorted(adm):
        if last is not None:
            level = max(0, level - r * (t - last))
        level += adm[t]
        last = t
        best = max(best, level - B)
    return best


def worst_window_sliding(adm, W, L):
    """max over t of A(t-W, t] - L"""
    ts = sorted(adm)
    best, lo, s = -L, 0, 0
    for t in ts:
        s += adm[t]
        while ts[lo] <= t - W:
            s -= adm[ts[lo]]
            lo += 1
        best = max(best, s - L)
    return best


def worst_window_fixed(adm, W, L):
    c = defaultdict(int)
    for t, n in adm.items():
        c[t // W] += n
    return max(c.values()) - L


def worst_weighted(adm, W, L):
    """max over t of (prev*(W-f) + cur*W)/W - L, rounded up, cur counted up to t"""
    c, best = defaultdict(int), -10**9
    for t in sorted(adm):
        w, f = divmod(t, W)
        c[w] += adm[t]
        best = max(best, -(-(c[w - 1] * (W - f) + c[w] * W) // W) - L)
    return best


rng = random.Random(20240607)
cases = []
for i in range(80):
    adm = defaultdict(int)
    for _ in range(rng.randint(1, 25)):
        adm[rng.randint(-40, 120)] += rng.randint(1, 9)
    B, r, W = rng.randint(10, 60), rng.randint(0, 3), rng.randint(1, 40)
    history = sorted(adm.items())
    if r > 0:
        cases.append(dict(kind=1, rate=r, period=1, burst=B // 2, history=history, worst=worst_curve(adm, B // 2, r)))
    cases.append(dict(kind=3, rate=B, period=W, burst=0, history=history, worst=worst_window_fixed(adm, W, B)))
    cases.append(dict(kind=4, rate=B, period=W, burst=0, history=history, worst=worst_weighted(adm, W, B)))
    cases.append(dict(kind=5, rate=B, period=W, burst=0, history=history, worst=worst_window_sliding(adm, W, B)))
print("[")
print(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases))
print("]")
