"""Private runs (docs/privacy.md): sums without their summands, overlaps without masks.

Pure functions of keys and arrays.

`masking.py`: fixed point and pairwise masks. `sketch.py`: the form of a mask on the wire, and the overlaps of sketches.
`keyring.py`: the keys of sites, from files, or from the seed if all clients are on one machine. Both halves of a run
use this package. Its code depends on neither Flower nor a method.

The protocol
------------

Client i has number i, permanent keys S_i (X25519) and G_i (Ed25519), and a pinned list L of all permanent public
keys. H is SHA-256, and H(L) is over the public keys in the clients' order, not over the file. KDF is HKDF-SHA256, C
the configuration's hash (without other methods' tables), run Flower's number of the run. No key is used twice.

1. Once in a run. The server asks for properties. Client i draws M_i and E_i (X25519), and answers with both public
   halves and with G_i's signature over (run, i, N, C, H(L), M_i, E_i), and with L. The server leaves out i if H(L) is
   not that of most clients, or if the signature is false. A second question in the run gets the same keys. Another
   configuration, list or number gets a refusal. For FedCAC the server then sends the connected client l with the
   lowest number the others' signed keys. l answers with its sketches' key K, sealed for each i under KDF(E_l·E_i,
   "sketch", run, C, H(L), l, i).
2. Download, round t, attempt k. Client i receives the model, the members I of its sum, their signed keys, the hash of
   what each member is sent, and a bound on sample counts (0 for none; another one only with `max-size-weight`).
   FedCAC adds the mean of the client's cluster, and the sketches' key sealed for i.
3. The client checks that I is sorted, and has itself and at least three members. The members' keys must differ,
   include its own, and be signed by L's keys. Its hash must be that of what it received, and the hash of at least
   three members. The hash is of arrays and scalars, and, unless `private-left-out = "client"`, of the name of the
   state that the client continues from; a client without this state refuses. It also refuses if

   - (t, k) was answered under these keys, or `round-retries` + 1 attempts at t were, or the keys serve another
     experiment;
   - the bound on counts is another one than at first in the experiment;
   - a member of its aggregation group P is not among the members of I with the client's hash. P is the client's first
     group, as the configuration has it, after all splits in the message, and those that it has noted. (Not with
     `private-left-out = "client"`.)

   It notes the answer in the site's own directory before it trains.
4. Upload. Client i merges, trains, and computes (n = |I|, t = max(3, ceil(2n/3)))

   - a_i = g(n_i)/g(2^24) with its own count n_i, as in its first round, at most the bound. The method weighs a count
     by g: n, or 1 if all count equally.
   - x_i = (round(2^s a_i w_i), round(2^r a_i)) modulo 2^64, with w_i clipped to ±R. s = 62 − ceil(log2 RN), r = 62 −
     ceil(log2 N), and R = `private-range`; for BatchNorm's statistics R is 64 times as large. For 40 clients and R =
     8, s is 53. With counts of 100 the mean is off by less than 2^-35 before it is rounded to float32.
   - T = H(experiment, run, C, t, k, I, the hashes sent, the members' signed keys, H(L), the bound, the number of
     words).
   - k_ij = KDF(M_i·M_j, "mask", T, min(i, j), max(i, j)), a new seed b_i of 31 bytes, and y_i = x_i + PRG(KDF(b_i,
     "own mask")) + Σ_{j>i} PRG(k_ij) − Σ_{j<i} PRG(k_ij) modulo 2^64, over j in I. PRG is AES-128 in counter mode.
   - For each j in I, j's share of b_i (Shamir, CACM 1979; modulo 2^255 − 19, t shares restore it), sealed under
     KDF(E_i·E_j, "share", T, i, j) (ChaCha20-Poly1305). With them go H(i, j, share) for each j, and H(i, b_i). Client
     i notes I, the members' signed keys and T, and forgets b_i.
   - FedCAC: z_i = (B_i∘π)[0:m] ⊕ r, the mask B_i in an order and under a pad that follow from KDF(K, "sketch",
     experiment, t, k).

   y_i has a word of 8 bytes for each value, and one more; n shares and hashes take 146 bytes each. The method's other
   reports stay at home: FedOBP's counts per layer, APFL's alpha, FedDPA's share of personal parameters. A split of an
   aggregation group P into parts P_1, P_2, … of three members or more needs a question before step 2 or step 6. The
   connected members of P receive the parts, and answer with G_i's signature over (experiment, H(L), P_1, P_2, …).
   Client i refuses if P is not its group, or if it has signed another split of P; it notes its signature before it
   answers. A split with the signatures of two thirds of P is valid. The server drops false signatures, by name. The
   next message to each member of P has it, with all signatures. Client i refuses a split with fewer signatures, and a
   split other than the one that it has signed. Then the part with i is its group for the rest of the experiment. In
   the same experiment, configurations with other first groups, and another list L, are refused.
5. The server checks shape and attempt, and adds y_i to its sum. When all have answered or are given up, it chooses
   the survivors S: the members that have answered, without those whose aggregation group has an absent member.
6. Agreement, only if S ≠ I. Each survivor receives S, and answers with G_i's signature over (T, S). The server, which
   knows all parts of T, drops false signatures by name. If fewer than t are left, the attempt ends.
7. Opening. Each survivor receives S, the signatures if S ≠ I, and the survivors' shares that are sealed for it, with
   their hashes. It refuses if

   - it did not answer (t, k), S is no part of the noted I or has fewer than t members, or it helped to open or signed
     another S of this attempt;
   - a member of its aggregation group is not in S (not with `private-left-out = "client"`);
   - S ≠ I and fewer than t survivors have signed (T, S);
   - more than a third of the shares were not sealed for it in this attempt.

   It notes S before it answers, with its share of b_j for each j in S, and with k_iu for each u in I without S. In
   place of a share that it cannot open, or that has another hash, it sends 2^256 − 1, which is no share.
8. The sum. An answer with a share of another hash is dropped, and its client named. The server restores each b_j from
   any t shares. If b_j has another hash, or fewer than t members have a share, the sum cannot be opened. In the first
   case j is named. In the second the server counts the pairs of maker and holder of a missing share, and names the
   client in most pairs, or both of a single pair. The next attempt is without these clients. Otherwise Σ_S y_i − Σ_S
   PRG(KDF(b_i, "own mask")) ∓ Σ PRG(k_iu) = Σ_S x_i. The last word is the sum of weights that the others are divided
   by. Clients with different T share no masks: then shares do not open, or the sum is uniform noise, and at least
   half of its values are outside the range that N clients can produce. The server then names the group. Integer sums
   do not depend on their order: the digest is the same in simulation, in a deployment and in one process.
9. If a sum cannot be opened, the attempt ends. The next one asks whole aggregation groups of the remaining clients
   (`round-retries`), without members of S that were silent, unless half of S was; they train again from the same
   models. A group with a known sum is asked again as a whole or not at all. Fewer than three clients, or fewer than
   `min-results`, make a failed attempt.
10. The last message lets a client delete M_i, E_i and the notes on them. It answers whether one of its values was
    ever clipped. It takes no further part in the run.

Why nobody alone is opened
--------------------------

These are the double masks of Bonawitz et al. (CCS 2017), in their form against a server that lies. A client reveals
shares of a member's own mask, or its key with that member, never both. Let h clients follow the protocol, and k = n −
h work with the server. Two sets of survivors would need 2t signatures, and each of the h clients signs one. So if k <
2t − n, one set S ≠ I at most has t signatures. Those who answer it reveal no key between two survivors. Those who
answer I reveal no key at all, and are too few to restore the own mask of a client outside S. What remains is the sum
over S, or over I. With more clients of its own the server can have two sets, each with t − k others or more.
"""
