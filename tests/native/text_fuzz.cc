// Opens a text file again and again with bytes of it changed, and uses what opens; then gives the
// whole file odd texts and ids from several threads: text_fuzz FILE COUNT SEED.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <regatta_text.hpp>
#include <thread>

namespace {

using Dice = std::mt19937;

size_t below(Dice& dice, size_t end) { return end == 0 ? 0 : dice() % end; }

std::string changed(std::string data, Dice& dice) {
  constexpr uint32_t kNumbers[] = {0, 1, 255, 1u << 22, 0x7FFFFFFF, 0xFFFFFFFF};
  for (size_t i = 1 + below(dice, 4); i > 0; --i) {
    // Half of the places are in front, where the numbers are that decide most.
    const size_t at = below(dice, dice() % 2 ? data.size() : std::min<size_t>(data.size(), 300));
    const size_t size = std::min<size_t>(data.size() - at, 1 + below(dice, 40));
    switch (dice() % 6) {
      case 0:
        data[at] ^= static_cast<char>(1 << below(dice, 8));
        break;
      case 1:
        data.erase(at, size);
        break;
      case 2:
        data.insert(at, data.substr(below(dice, data.size()), size));
        break;
      case 3:
        for (size_t j = at; j < at + size; ++j) data[j] = static_cast<char>(dice());
        break;
      case 4:
        data.resize(std::max<size_t>(at, 24));
        break;
      default:
        std::memcpy(&data[at], &kNumbers[below(dice, 6)], std::min<size_t>(4, data.size() - at));
    }
    if (data.size() < 24) data.resize(24);
  }
  const auto size = static_cast<uint32_t>(data.size());
  if (dice() % 8) std::memcpy(&data[16], &size, sizeof size);  // else that check ends it all
  return data;
}

// What stands in every call: texts of any bytes, ids of any number.
void use(const regatta_text* text, Dice& dice) {
  std::string given = "I'm  caf\xC3\xA9 \xE4\xBD\xA0\xE5\xA5\xBD 123\n\n<s> e\xCC\x81<|eot_id|>";
  if (dice() % 4 == 0) given = std::string(below(dice, 300), "a \n1"[below(dice, 4)]);
  if (dice() % 8 == 0) given += static_cast<char>(dice());
  std::vector<int32_t> ids(64);
  size_t count = 0;
  if (regatta_text_encode(text, given.data(), given.size(), dice() % 4, ids.data(), ids.size(),
                          &count)) {
    count = 0;
  }
  ids.resize(count);
  for (size_t i = 0; i < 20; ++i) ids.push_back(static_cast<int32_t>(dice() % 400));
  regatta_text_stream* stream = nullptr;
  if (regatta_text_stream_open(text, ids.data(), count / 2, dice() % 2 * 4, &stream)) std::abort();
  const char* piece;
  size_t size;
  for (const int32_t id : ids) {
    if (regatta_text_stream_add(stream, &id, 1, &piece, &size)) std::abort();
  }
  if (regatta_text_stream_finish(stream, &piece, &size)) std::abort();
  regatta_text_stream_close(stream);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::ifstream in(argv[1], std::ios::binary);
  const std::string data((std::istreambuf_iterator<char>(in)), {});
  const int count = std::atoi(argv[2]);
  Dice dice(static_cast<uint32_t>(std::atoi(argv[3])));
  int num_opened = 0;
  for (int i = 0; i < count; ++i) {
    const std::string hostile = changed(data, dice);
    regatta_text* text = nullptr;
    const regatta_text_status status = regatta_text_read(hostile.data(), hostile.size(), &text);
    if ((status == REGATTA_TEXT_OK) != (text != nullptr)) std::abort();
    if (status != REGATTA_TEXT_OK && regatta_text_error()[0] == 0) std::abort();
    if (text) {
      ++num_opened;
      use(text, dice);
    }
    regatta_text_close(text);
  }
  regatta_text* text = nullptr;
  regatta::check_text(regatta_text_read(data.data(), data.size(), &text));
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([text, seed, count] {
      Dice own(seed);
      for (int i = 0; i < count / 4; ++i) use(text, own);
    });
  }
  for (std::thread& thread : threads) thread.join();
  regatta_text_close(text);
  std::printf("%d of %d opened\n", num_opened, count);
}
