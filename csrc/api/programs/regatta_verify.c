/* Whether each file of a folder is the one that the export wrote: regatta_verify FOLDER. */
#include <regatta.h>
#include <stdio.h>

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: regatta_verify FOLDER\n");
    return 2;
  }
  if (regatta_verify(argv[1]) != REGATTA_OK) {
    fprintf(stderr, "%s\n", regatta_error());
    return 1;
  }
  printf("%s: every file is as it was written\n", argv[1]);
  return 0;
}
