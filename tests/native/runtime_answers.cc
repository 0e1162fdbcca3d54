// Answers of a folder's engine, all requests at once: runtime_answers FOLDER [TOKENIZER].
// The first line has options, each other one a request, as NAME=VALUE: names of regatta.h, ids with
// commas, texts in hex. Prints a line for each request, then the counters.
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <regatta.hpp>
#include <sstream>
#ifdef WITH_TEXT
#include <regatta_with_text.h>
#endif

namespace {

std::vector<std::string> parts_of(const std::string& text, char border) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, border);) parts.push_back(part);
  return parts;
}

std::vector<int32_t> ids_of(const std::string& text) {
  std::vector<int32_t> ids;
  for (const std::string& id : parts_of(text, ',')) ids.push_back(std::stoi(id));
  return ids;
}

std::string bytes_of(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

template <class Fields>
using Setters = std::map<std::string, std::function<void(Fields&, const std::string&)>>;

#define WHOLE(field) {#field, [](auto& f, const std::string& v) { f.field = std::stoll(v); }}
#define REAL(field) {#field, [](auto& f, const std::string& v) { f.fields.field = std::stod(v); }}
#define OWN(field) \
  {#field, [](regatta::Request& f, const std::string& v) { f.fields.field = std::stoll(v); }}

const Setters<regatta::Options> kOptions = {WHOLE(num_blocks), WHOLE(batch_size),
                                            WHOLE(max_num_batched_tokens), WHOLE(prefix_caching),
                                            WHOLE(seed)};
const Setters<regatta::Request> kFields = {
    OWN(max_new_tokens),
    OWN(min_new_tokens),
    OWN(top_k),
    OWN(no_repeat_ngram_size),
    OWN(ignore_eos),
    OWN(include_stop),
    OWN(num_logprobs),
    REAL(temperature),
    REAL(top_p),
    REAL(min_p),
    REAL(typical_p),
    REAL(repetition_penalty),
    REAL(presence_penalty),
    REAL(frequency_penalty),
    {"seed",
     [](regatta::Request& r, const std::string& v) {
       r.fields.has_seed = 1;
       r.fields.seed = std::stoll(v);
     }},
    {"prompt_ids", [](regatta::Request& r, const std::string& v) { r.prompt_ids = ids_of(v); }},
    {"stop_ids", [](regatta::Request& r, const std::string& v) { r.stop_ids = ids_of(v); }},
    {"bad_words",
     [](regatta::Request& r, const std::string& v) {
       for (const std::string& word : parts_of(v, ';')) r.bad_words.push_back(ids_of(word));
     }},
    {"logit_bias",
     [](regatta::Request& r, const std::string& v) {
       for (const std::string& pair : parts_of(v, ',')) {
         const auto each = parts_of(pair, ':');
         r.logit_bias.emplace_back(std::stoi(each[0]), std::stod(each[1]));
       }
     }},
    {"stop", [](regatta::Request& r, const std::string& v) {
       for (const std::string& hex : parts_of(v, ',')) r.stop.push_back(bytes_of(hex));
     }}};

template <class Fields>
void set(const Setters<Fields>& setters, const std::string& line, Fields* fields) {
  for (const std::string& word : parts_of(line, ' ')) {
    const size_t at = word.find('=');
    setters.at(word.substr(0, at))(*fields, word.substr(at + 1));
  }
}

struct Answer {
  int64_t finish = 0, num_cached = 0;
  std::vector<int32_t> ids;
  std::string text, logprobs, error;

  void add(const regatta::Event& event) {
    ids.insert(ids.end(), event.ids, event.ids + event.num_ids);
    text += event.new_text();
    finish = event.finish;
    num_cached = event.num_cached_tokens;
    error = event.error ? event.error : "";
    for (int64_t i = 0; event.logprobs && i < event.num_ids; ++i) {
      add_logprob(event.ids[i], event.logprobs[i], event.ranks[i]);
      for (int64_t k = 0; k < event.num_likeliest; ++k) {
        const int64_t at = i * event.num_likeliest + k;
        add_logprob(event.likeliest_ids[at], event.likeliest_logprobs[at], int32_t(k + 1));
      }
    }
  }
  void add_logprob(int32_t id, float logprob, int32_t rank) {
    char said[64];
    std::snprintf(said, sizeof said, "%d %.9g %d ", id, static_cast<double>(logprob), rank);
    logprobs += said;
  }
  void print() const {
    std::printf("%lld %lld|", static_cast<long long>(finish), static_cast<long long>(num_cached));
    for (const int32_t id : ids) std::printf("%d ", id);
    std::printf("|");
    for (const char byte : text) std::printf("%02x", static_cast<unsigned char>(byte));
    std::printf("|%s|%s\n", logprobs.c_str(), error.c_str());
  }
};

void run(int argc, char** argv) {
  regatta::Options options;
  std::string line;
  std::getline(std::cin, line);
  set(kOptions, line, &options);
#ifdef WITH_TEXT
  regatta_text* text = nullptr;
  if (argc > 2 && regatta_text_open(argv[2], &text) != REGATTA_TEXT_OK) {
    throw std::runtime_error(regatta_text_error());
  }
  const regatta_tokenizer tokenizer = regatta_tokenizer_of(text);
  if (text) options.tokenizer = &tokenizer;
#endif
  static_cast<void>(argc);
  {
    std::vector<Answer> answers;
    regatta::Engine engine(argv[1], options);
    std::vector<regatta::Request> requests;
    while (std::getline(std::cin, line)) {
      requests.emplace_back(engine);
      regatta::check(
          regatta_request_init(nullptr, &requests.back().fields, sizeof(regatta_request)));
      set(kFields, line, &requests.back());
    }
    answers.resize(requests.size());
    for (const regatta::Request& request : requests) {
      engine.submit(request, [&](const regatta::Event& event) { answers[event.id].add(event); });
    }
    while (engine.step()) {
    }
    for (const Answer& answer : answers) answer.print();
    const regatta_counters counters = engine.counters();
    std::printf("%lld preemptions %lld hits %lld steps\n",
                static_cast<long long>(counters.num_preemptions),
                static_cast<long long>(counters.num_prefix_hit_tokens),
                static_cast<long long>(counters.num_steps));
  }
#ifdef WITH_TEXT
  regatta_text_close(text);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
