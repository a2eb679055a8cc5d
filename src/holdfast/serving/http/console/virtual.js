// A list of rows of one height, of which only those that can be seen are in the page.

import { h } from "./dom.js";

const SPARE = 8; // rows beyond each edge

export class VirtualList {
  /** `render(item, index, row)` fills a row element, which may have shown another item before. */
  constructor(rowHeight, render, { role = "rowgroup" } = {}) {
    this.rowHeight = rowHeight;
    this.render = render;
    this.items = [];
    this.rows = new Map(); // index -> element
    this.free = [];
    this.space = h("div.virtual-space", { role });
    this.element = h("div.virtual", {}, this.space);
    this.element.addEventListener("scroll", () => this.update(), { passive: true });
    this.observer = new ResizeObserver(() => this.update());
    this.observer.observe(this.element);
  }

  show(items) {
    this.items = items;
    this.space.style.height = `${items.length * this.rowHeight}px`;
    this.update(true);
  }

  update(all = false) {
    const top = this.element.scrollTop;
    const first = Math.max(0, Math.floor(top / this.rowHeight) - SPARE);
    const last = Math.min(this.items.length, Math.ceil((top + this.element.clientHeight) / this.rowHeight) + SPARE);
    for (const [index, row] of this.rows) {
      if (index >= first && index < last) continue;
      this.rows.delete(index);
      this.free.push(row);
    }
    for (let index = first; index < last; index += 1) {
      let row = this.rows.get(index);
      if (row && !all) continue;
      if (!row) {
        row = this.free.pop() ?? this.space.appendChild(h("div.row"));
        row.style.transform = `translateY(${index * this.rowHeight}px)`;
        row.hidden = false;
        this.rows.set(index, row);
      }
      this.render(this.items[index], index, row);
    }
    for (const row of this.free) row.hidden = true;
  }

  reveal(index) {
    const top = index * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight) this.element.scrollTop = top + this.rowHeight - clientHeight;
  }

  close() {
    this.observer.disconnect();
  }
}
