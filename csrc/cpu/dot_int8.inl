// Dot products of four bytes per 32-bit lane, unsigned codes times signed activations. What a set's
// dot_*.inl has, in namespace int8:
//
//   kSignedCodes                                  load_codes() gives codes less 128, signed
//   struct Ints                                   Vec::kLanes int32
//   struct Codes                                  4 codes for each lane, ready to multiply
//   struct Bytes                                  4 activations, the same for all lanes
//   Codes load_codes(const uint8_t*)              4 * kLanes codes
//   void load_nibbles(const uint8_t*, Codes& low, Codes& high)
//                                                 the low and the high halves of 4 * kLanes bytes
//   Bytes load_bytes(const int8_t*)               4 values to all lanes
//   Ints dot(Ints sum, Codes, Bytes)              exact
//   Ints set_ints(int32_t), add(Ints, Ints);  Vec to_vec(Ints)
#include REGATTA_DOT_INL
