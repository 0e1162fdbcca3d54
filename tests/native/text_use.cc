// The same as text_use.c, by the C++ classes, and in pieces.
#include <iostream>
#include <regatta_text.hpp>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const regatta::Text text(argv[1]);
    const std::vector<int32_t> ids = text.encode(argv[2], REGATTA_TEXT_PLAIN);
    for (const int32_t id : ids) std::cout << id << ' ';
    std::string joined;
    {
      regatta::TextStream stream = text.stream({}, REGATTA_TEXT_PLAIN);
      for (const int32_t id : ids) joined += stream.add(id);
      joined += stream.finish();
    }
    if (joined != text.decode(ids, REGATTA_TEXT_PLAIN)) return 3;
    std::cout << joined << '\n';
  } catch (const regatta::TextError& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
