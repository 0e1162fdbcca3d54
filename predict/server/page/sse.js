// Server-sent events out of a body that may be cut at any byte.

const MAX_EVENT = 1 << 24; // characters

/** Collects the data of events. */
export class EventParser {
  constructor() {
    this.decoder = new TextDecoder(); // keeps the bytes of a character that is cut
    this.parts = []; // of the line that is not complete
    this.data = []; // lines of the event that is not complete
    this.size = 0;
    this.endedInReturn = false;
  }

  /** The data of the events that are complete with these bytes. */
  feed(bytes) {
    let text = this.decoder.decode(bytes, { stream: true });
    if (text === "") return [];
    // The line ended already: its \n comes in another piece than its \r.
    if (this.endedInReturn && text[0] === "\n") text = text.slice(1);
    this.endedInReturn = text.endsWith("\r");
    const found = [];
    const lines = text.split(/\r\n|\n|\r/);
    const last = lines.pop();
    for (const line of lines) {
      this.parts.push(line);
      this.line(this.parts.join(""), found);
      this.parts = [];
    }
    this.parts.push(last);
    this.size += text.length;
    if (this.size > MAX_EVENT) throw new RangeError("an event of more than 16 MiB");
    return found;
  }

  line(line, found) {
    if (line === "") {
      if (this.data.length > 0) found.push(this.data.join("\n"));
      this.data = [];
      this.size = 0;
    } else if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}
