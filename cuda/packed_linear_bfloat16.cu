// Products of packed spikes with a bfloat16 weight.
#include "packed_linear.cuh"

PRODUCT_ENTRIES(bfloat16, Bfloat16)
