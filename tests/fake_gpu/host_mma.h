// mma.m16n8k16 for the host, by its layout in the PTX manual, lane by lane; after host_block.h and numbers.cuh.
inline float part(u32 pair, int high) { return number(high ? pair >> 16 : pair & 0xffff); }
static u32 operands[BLOCK_THREADS / 32][32][6];
// d += a b. own: this lane's four registers of a, and two of b.
static void mma_16816(float* d, const u32 (&own)[6]) {
    const int self = threadIdx.x, lane = self % 32, row = lane / 4, quad_lane = lane % 4;
    auto& all = operands[self / 32];
    memcpy(all[lane], own, sizeof(own));
    host_block::wait(host_block::warps[self / 32]);
    for (int i = 0; i < 4; i++) {
        const int column = quad_lane * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const u32 left = all[row * 4 + k % 8 / 2][k / 8 * 2 + i / 2];
            const u32 right = all[column * 4 + k % 8 / 2][4 + k / 8];
            d[i] += part(left, k % 2) * part(right, k % 2);
        }
    }
    host_block::wait(host_block::warps[self / 32]);
    threadIdx.x = self;
}
