"""Show memprof's reports in TensorBoard's Memory tab."""
