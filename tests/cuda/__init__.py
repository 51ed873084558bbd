"""Tests that run the CUDA build of torch, on memprof's emulated device where there is no GPU."""
