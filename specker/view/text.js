// The text as lines of equal height, of which only the visible ones are elements. A 100,000-token text is laid out in
// one pass over its characters; a segment is the part of a token in one line.

const LINE = 24; // px; page.css uses the same height
const BEYOND = 8; // lines drawn above and below the window
const NO_TEXT = "\u25cc"; // stands for a token without text of its own

// East Asian and emoji characters take two columns of a monospace font.
const isWide = (c) =>
  c >= 0x1100 && (c <= 0x115f || (c >= 0x2e80 && c <= 0xa4cf) || (c >= 0xac00 && c <= 0xd7a3) ||
  (c >= 0xf900 && c <= 0xfaff) || (c >= 0xfe30 && c <= 0xfe6f) || (c >= 0xff00 && c <= 0xff60) || c >= 0x1f300);

class Layout {
  constructor(columns) {
    this.columns = Math.max(8, columns);
    this.lines = [[]]; // of segments { text, kind, round, token }
    this.firstLine = []; // by round
    this.used = 0;
  }

  breakLine() {
    this.lines.push([]);
    this.used = 0;
  }

  words(text, kind) {
    for (const word of text.match(/\S+[^\S\n]*|\s+/g) ?? []) this.add(word, kind, -1, -1);
  }

  // A token moves to the next line as a whole if it fits there.
  add(text, kind, round, token) {
    const width = [...text].reduce((sum, c) => sum + (isWide(c.codePointAt(0)) ? 2 : 1), 0);
    if (this.used && this.used + width > this.columns && width <= this.columns && !text.includes("\n")) this.breakLine();
    let part = "";
    const put = () => {
      if (part) this.lines.at(-1).push({ text: part, kind, round, token });
      part = "";
    };
    if (round >= 0 && this.firstLine[round] === undefined) this.firstLine[round] = this.lines.length - 1;
    for (const c of text) {
      const wide = isWide(c.codePointAt(0)) ? 2 : 1;
      if (c === "\n") {
        if (round >= 0) part += "\u21b5";
        put();
        this.breakLine();
        continue;
      }
      if (this.used + wide > this.columns) {
        put();
        this.breakLine();
      }
      part += c === "\t" ? "\u21e5" : c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : c;
      this.used += wide;
    }
    put();
  }
}

function layOut(trace, columns) {
  const out = new Layout(columns);
  for (const turn of trace.turns) {
    if (out.used) {
      out.breakLine();
      out.breakLine();
    }
    out.words(turn.title, "title");
    out.breakLine();
    out.words(turn.prompt, "prompt");
    out.breakLine();
    for (const r of turn.list) {
      const outside = new Set(r.outside ?? []);
      r.pieces.forEach((piece, n) => {
        const kind = n < r.accepted ? "accepted" : r.last;
        out.add(piece || NO_TEXT, kind + (outside.has(n) ? " outside" : ""), r.index, n);
      });
    }
    out.add(turn.tail, "own", -1, -1);
    if (out.used) out.breakLine();
    out.words(`(${STATES[turn.finished] ?? "the trace ends here: the run was interrupted, or the file is cut"})`, "title");
  }
  return out;
}

const STATES = { stop: "ended by a stop token or string", length: "ended at its limit of tokens",
  context: "ended because the context is full", "not finite": "ended because the logits are not finite",
  cancelled: "cancelled", failed: "ended by an error", running: "running", prefill: "the prompt is being prefilled",
  waiting: "waiting" };

// Draws the visible lines of a layout into `box`, which scrolls.
class TextView {
  constructor(box, trace) {
    this.box = box;
    this.trace = trace;
    this.marked = -1;
    this.sheet = element("div", "sheet");
    box.append(this.sheet);
    box.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.resize()).observe(box);
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  resize() {
    if (!this.box.clientWidth) return; // not on the page
    const probe = element("span", "t", "0".repeat(50));
    this.sheet.append(probe);
    const columns = Math.floor((this.box.clientWidth - 28) / (probe.getBoundingClientRect().width / 50));
    probe.remove();
    if (columns !== this.layout?.columns) {
      this.layOut(columns);
      if (this.marked >= 0) this.reveal(this.marked);
    }
    this.draw();
  }

  layOut(columns) {
    this.layout = layOut(this.trace, columns);
    this.sheet.style.height = `${this.layout.lines.length * LINE}px`;
    this.drawn = undefined;
  }

  // The trace has changed. A box that shows the text's end shows the new end if it `follows`.
  grow(follows) {
    if (!this.layout) return;
    const { box } = this, atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - LINE;
    this.layOut(this.layout.columns);
    if (follows && atEnd) box.scrollTop = box.scrollHeight;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - BEYOND);
    const last = Math.min(this.layout.lines.length, first + Math.ceil(this.box.clientHeight / LINE) + 2 * BEYOND);
    if (this.drawn === `${first} ${last}`) return;
    this.drawn = `${first} ${last}`;
    this.sheet.replaceChildren(...Array.from({ length: last - first }, (_, n) => this.line(first + n)));
  }

  line(number) {
    const row = element("div", "line");
    row.style.top = `${number * LINE}px`;
    for (const s of this.layout.lines[number]) {
      const span = element("span", `t ${s.kind}`, s.text);
      if (s.round >= 0) span.dataset.round = s.round;
      if (s.round >= 0 && s.round === this.marked) span.classList.add("marked");
      row.append(span);
    }
    return row;
  }

  mark(round) {
    this.marked = round;
    for (const span of this.sheet.querySelectorAll("[data-round]"))
      span.classList.toggle("marked", Number(span.dataset.round) === round);
  }

  // Scrolls only if the round's first line is outside the window.
  reveal(round) {
    if (!this.layout) return;
    const top = this.layout.firstLine[round] * LINE, height = this.box.clientHeight;
    if (top < this.box.scrollTop || top > this.box.scrollTop + height - 2 * LINE)
      this.box.scrollTop = Math.max(0, top - height / 3);
  }
}

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
