"""Private runs (docs/privacy.md): sums without their summands, overlaps without masks. Pure functions of keys and arrays.

`masking.py`: fixed point and pairwise masks. `sketch.py`: what a mask becomes on the wire, and the overlaps of sketches.
`keyring.py`: the keys of sites, in files, or from the seed where all clients are on one machine. Both halves of a run use them.
Nothing here knows Flower or a method.
"""
