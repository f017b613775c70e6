// What numbers.cu has in PTX, for the host.
#include <string.h>

inline float number_of_half(unsigned short bits) {
    _Float16 r;
    memcpy(&r, &bits, 2);
    return r;
}
inline unsigned short half_of(float value) {
    _Float16 of = (_Float16)value;
    unsigned short r;
    memcpy(&r, &of, 2);
    return r;
}
inline float number_of_bfloat16(unsigned short bits) {
    unsigned wide = (unsigned)bits << 16;
    float r;
    memcpy(&r, &wide, 4);
    return r;
}
inline unsigned short bfloat16_of(float value) {  // to the nearest, ties to even
    unsigned bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
