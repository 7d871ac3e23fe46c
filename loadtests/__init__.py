"""Load tests: open-loop arrivals, sweeps, soak and side-by-side benchmarks."""
