// The end of the conversation stays in sight, until the reader scrolls up.

const NEAR = 24; // pixels from the end that count as the end

/** Follows the end of an element that scrolls; shows a button where it does not. */
export class Follower {
  constructor(scroller, latest) {
    this.scroller = scroller;
    this.latest = latest;
    this.isFollowing = true;
    this.lastTop = 0;
    scroller.addEventListener("scroll", () => this.noteScroll());
  }

  noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const left = scrollHeight - clientHeight - scrollTop;
    if (left < NEAR) this.isFollowing = true;
    else if (scrollTop < this.lastTop) this.isFollowing = false;
    this.lastTop = scrollTop;
    this.latest.hidden = left < 2 * NEAR || this.isFollowing;
  }

  /** There is more to see. */
  grown() {
    if (this.isFollowing) this.toEnd();
    else this.latest.hidden = false;
  }

  toEnd() {
    this.isFollowing = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.latest.hidden = true;
  }
}
