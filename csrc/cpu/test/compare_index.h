// An indexer's random step through every instruction set.
#pragma once

#include <stdint.h>

// Failures of one seed; counts its runs.
int compare_index(uint32_t seed, int *runs);
