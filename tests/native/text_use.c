/* Ids of a text and their text again, by the plain C interface: text_use FILE TEXT. */
#include <regatta_text.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char** argv) {
  regatta_text* text = NULL;
  int32_t ids[64];
  char out[256];
  size_t num_ids = 0, size = 0, i;
  if (argc != 3 || regatta_text_version() != REGATTA_TEXT_VERSION) return 2;
  if (regatta_text_open(argv[1], &text) != REGATTA_TEXT_OK) {
    fprintf(stderr, "%s\n", regatta_text_error());
    return 1;
  }
  if (regatta_text_encode(text, argv[2], strlen(argv[2]), REGATTA_TEXT_PLAIN, ids, 1, &num_ids) !=
          REGATTA_TEXT_TOO_SMALL ||
      num_ids > 64) {
    return 3;
  }
  if (regatta_text_encode(text, argv[2], strlen(argv[2]), REGATTA_TEXT_PLAIN, ids, 64, &num_ids) ||
      regatta_text_decode(text, ids, num_ids, REGATTA_TEXT_PLAIN, out, sizeof out, &size)) {
    fprintf(stderr, "%s\n", regatta_text_error());
    return 1;
  }
  for (i = 0; i < num_ids; ++i) printf("%d ", (int)ids[i]);
  printf("%.*s\n", (int)size, out);
  regatta_text_close(text);
  return 0;
}
