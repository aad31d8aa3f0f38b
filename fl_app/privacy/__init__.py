"""Private runs (docs/privacy.md): sums without their summands, overlaps without masks.

Pure functions of keys and arrays.

`masking.py`: fixed point and pairwise masks. `sketch.py`: the form of a mask on the wire, and the overlaps of sketches.
`keyring.py`: the keys of sites, from files, or from the seed if all clients are on one machine. Both halves of a run
use this package. Its code depends on neither Flower nor a method.
"""
