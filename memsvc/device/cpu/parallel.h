// Loops on torch's own threads. The library links neither torch nor an OpenMP runtime: torch's function is handed in.
#pragma once

#include <cstdint>

using Range = void (*)(int64_t begin, int64_t end, void *context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Range range, void *context);

extern ParallelFor parallel_for;

// body(begin, end) over parts of [0, num); a part has at least grain entries unless it is the only one.
template <typename Body>
void in_parts(int64_t num, int64_t grain, const Body &body) {
    const auto range = [](int64_t begin, int64_t end, void *context) {
        (*static_cast<const Body *>(context))(begin, end);
    };
    if (num <= grain || parallel_for == nullptr)
        body(0, num);
    else
        parallel_for(0, num, grain, range, const_cast<Body *>(&body));
}
