"""The parts of `benchmarks/bench_prediction.py`, predicted against measured step time.

cases.py: models and lengths; variants.py: the plans that a case compares; turns.py: steps of all variants in turns;
real.py: models on two ranks; sleeping.py: stages that sleep their cost; result.py: what a launch found, as rows and as
a file. `python -m benchmarks.prediction` is one worker of a launch.
"""
