// Between the two products of an MLP. Behind gemm.inl and functions.inl.
namespace regatta::cpu::REGATTA_ISA {

// function(gate) * up of two tiles of products, or function(up) of one, into columns of the rows
// that `down` multiplies; and into `kept` [rows, width], unless null. bias: the gate's, and
// `up_offset` behind it up's; or null.
template <Function kFunction, class T>
void activate_tiles(const Activation& of, const PackedRows& rows, int64_t row, int64_t num_rows,
                    int64_t column, const float* first, const float* up, const T* bias,
                    int64_t up_offset, float* kept = nullptr) {
  constexpr int kLanes = Vec::kLanes;
  const bool plain = of.is_plain();
  float values[kPanel];
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int j = 0; j < kPanel; j += kLanes) {
      Vec x = load(first + i * kPanel + j);
      if (bias) x = x + load(bias + column + j);
      if (!up) {
        store(values + j, apply<kFunction>(x));
        continue;
      }
      Vec u = load(up + i * kPanel + j);
      if (bias) u = u + load(bias + up_offset + column + j);
      store(values + j, plain ? apply<kFunction>(x) * u : gated<kFunction>(of, x, u));
    }
    pack_columns(rows, row + i, column, values, kPanel);
    if (kept) copy_row(values, kept + (row + i) * rows.width + column, kPanel);
  }
}

// The same of a whole row of products, into row `row`; changes them.
template <Function kFunction>
void activate_products(const Activation& of, const PackedRows& rows, int64_t row, float* products) {
  float* up = of.gated ? products + rows.width : nullptr;
  activate_row<kFunction>(of, static_cast<const float*>(products), static_cast<const float*>(up),
                          products, rows.width);
  pack_row(rows, row, static_cast<const float*>(products));
}

}  // namespace regatta::cpu::REGATTA_ISA
