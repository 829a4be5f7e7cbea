"""Teaching and judging models: training, evaluation, calibration of methods, benchmarks."""
