// Where the results of a GEMM go. Its weight may be the concatenation of up to three, each with an output of its own.
#pragma once
#include "overlap.cuh"

struct Outputs {
    unsigned short *first, *second, *third;   // [rows, out_features of the weight]
    int first_end, second_end, out_features;  // of the concatenation

    __device__ __forceinline__ void store(int row, int output, unsigned short result) const {
        if (output < first_end) first[(long long)row * first_end + output] = result;
        else if (output < second_end) second[(long long)row * (second_end - first_end) + output - first_end] = result;
        else third[(long long)row * (out_features - second_end) + output - second_end] = result;
    }
};
