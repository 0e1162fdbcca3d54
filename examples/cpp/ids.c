/* Ids in, ids out, in C: ids FOLDER ID... */
#include <inttypes.h>
#include <regatta.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(void) {
  fprintf(stderr, "%s\n", regatta_error());
  return 1;
}

static void print(void* user, const regatta_event* event) {
  int64_t i;
  (void)user;
  for (i = 0; i < event->num_ids; ++i) printf("%" PRId32 " ", event->ids[i]);
  if (event->finish == REGATTA_ERROR) fprintf(stderr, "%s\n", event->error);
  if (event->finish != REGATTA_UNFINISHED) printf("\n");
}

int main(int argc, char** argv) {
  regatta_options options;
  regatta_engine* engine = NULL;
  regatta_request request;
  int32_t ids[256];
  int64_t ran = 1;
  size_t i;
  if (argc < 3 || argc > 258) {
    fprintf(stderr, "usage: ids FOLDER ID...\n");
    return 2;
  }
  for (i = 2; i < (size_t)argc; ++i) ids[i - 2] = (int32_t)strtol(argv[i], NULL, 10);

  if (regatta_options_init(&options, sizeof options)) return failed();
  if (regatta_open(argv[1], &options, &engine)) return failed();
  if (regatta_request_init(engine, &request, sizeof request)) return failed();
  request.prompt_ids.data = ids;
  request.prompt_ids.size = (size_t)argc - 2;
  request.max_new_tokens = 16;
  request.temperature = 0;
  request.callback = print;
  if (regatta_submit(engine, &request, NULL)) return failed();
  while (ran) {
    if (regatta_step(engine, &ran)) return failed();
  }
  return regatta_close(engine) ? failed() : 0;
}
