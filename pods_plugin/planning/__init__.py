"""What a run will need and cost, known before it starts: memory a GPU, seconds a step, and the n worth generating.

Pure arithmetic on a composed config: no torch, no verl, no GPU. `docs/planning.md` has every formula and its source.
"""
