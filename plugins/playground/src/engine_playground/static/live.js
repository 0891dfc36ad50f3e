// What the engine does now: asked for once an interval, while the page can be seen.
import { keyIsWanted } from "./key.js";
import { CLASSES, colours, paint } from "./map.js";
import { get } from "./stream.js";
import { element } from "./turns.js";

const KEPT_SECONDS = 60;
const LONGEST_WAIT = 30;
const at = (id) => document.getElementById(id);
const whole = (number) => Math.round(number).toLocaleString("en");
const share = (part, of) => (of ? `${((100 * part) / of).toFixed(of > part && part ? 1 : 0)} %` : "–");

export class Live {
  constructor() {
    this.before = null;
    this.rates = []; // { time, tokens } a second
    this.wait = 1;
    this.timer = 0;
    this.looking = false;
    this.pages = [];
    this.told = "";
    for (const [index, name] of CLASSES.entries()) {
      const item = element("li");
      const swatch = element("span", "swatch");
      swatch.dataset.class = index;
      item.append(swatch, element("span", "", name), element("b", "", "–"));
      at("legend").append(item);
    }
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.lookNow();
    });
    new ResizeObserver(() => this.repaint()).observe(at("maps"));
  }

  start() {
    this.lookNow();
  }

  async lookNow() {
    clearTimeout(this.timer);
    if (this.looking) return;
    this.looking = true;
    try {
      const news = await get("playground/live");
      this.wait = news.refresh;
      at("live-fault").textContent = "";
      this.show(news);
    } catch (error) {
      if (error.status === 401) keyIsWanted();
      const told = error instanceof TypeError ? "the server cannot be reached" : error.message;
      at("live-fault").textContent = told;
      if (!this.before) at("facts").textContent = "not connected";
      this.wait = Math.min(LONGEST_WAIT, Math.max(1, this.wait) * (error.status === 503 ? 1 : 1.7));
      this.before = null;
    }
    this.looking = false;
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.lookNow(), this.wait * 1000);
  }

  show(news) {
    const stats = news.stats ?? {};
    const before = this.before;
    this.before = news;
    this.#facts(news);
    const seconds = before ? Math.max(0, news.time - before.time) : 0;
    const grown = (name) => Math.max(0, (stats[name] ?? 0) - (before?.stats?.[name] ?? 0));
    const rate = seconds ? grown("generation_tokens") / seconds : 0;
    if (seconds) this.rates.push({ time: news.time, rate });
    this.rates = this.rates.filter(({ time }) => time > news.time - KEPT_SECONDS);
    at("tokens").textContent = rate && rate < 10 ? rate.toFixed(1) : whole(rate);
    at("prompt-tokens").textContent = whole(seconds ? grown("prompt_tokens") / seconds : 0);
    at("running").textContent = whole(stats.num_running ?? 0);
    at("waiting").textContent = whole(stats.num_waiting ?? 0);
    at("preemptions").textContent = whole(stats.num_preemptions ?? 0);
    at("hits").textContent = share(stats.prefix_hits, stats.prefix_queries);
    const sources = Object.entries(news.sources ?? {}).filter(([name]) => !["device", "computed"].includes(name));
    const others = sources.map(([name, count]) => `; ${share(count, stats.prefix_queries)} from ${name}`).join("");
    at("hits-note").textContent = stats.prefix_queries
      ? `${whole(stats.prefix_hits)} of ${whole(stats.prefix_queries)} prompt tokens${others}`
      : "no prompt yet";
    at("drafts").textContent = share(stats.num_accepted_drafts, stats.num_drafts);
    at("drafts-note").textContent = stats.num_drafts
      ? `${whole(stats.num_accepted_drafts)} of ${whole(stats.num_drafts)} drafts; by place ` +
        stats.accepted_drafts_at.map((count) => share(count, stats.num_draft_rows)).join(", ")
      : "nothing was drafted";
    this.#spark(news.time);
    this.#pages(news.pages);
  }

  repaint() {
    const palette = colours();
    const canvases = at("maps").querySelectorAll("canvas");
    for (const [rank, page] of this.pages.entries()) {
      if (canvases[rank]) paint(canvases[rank], page.cells, palette);
    }
  }

  #facts(news) {
    const told = JSON.stringify([news.engine, news.drivers]);
    if (!news.engine || told === this.told) return;
    this.told = told;
    const { model, architecture, dtype, device, max_model_len: length, num_ranks: ranks } = news.engine;
    const cores = ranks > 1 ? `, ${ranks} engine cores` : "";
    at("facts").textContent = `${model} · ${architecture} · ${dtype} on ${device} · ${whole(length)} tokens${cores}`;
    at("facts").title = at("facts").textContent;
    document.title = `${model} – Engine playground`;
    at("drivers").replaceChildren(...news.drivers.map(driverItem));
  }

  #spark(now) {
    const most = Math.max(1, ...this.rates.map(({ rate }) => rate));
    const points = this.rates.map(({ time, rate }) => {
      const x = 120 - ((now - time) / KEPT_SECONDS) * 120;
      return `${x.toFixed(1)},${(31 - (rate / most) * 29).toFixed(1)}`;
    });
    at("spark").querySelector("polyline").setAttribute("points", points.join(" "));
    at("spark").setAttribute("aria-label", `Tokens per second in the last minute, at most ${whole(most)}`);
  }

  #pages(pages) {
    this.pages = pages;
    const maps = at("maps");
    while (maps.children.length > pages.length) maps.lastChild.remove();
    while (maps.children.length < pages.length) {
      const canvas = element("canvas");
      canvas.setAttribute("role", "img");
      maps.append(canvas);
    }
    const sum = (of) => pages.reduce((total, page) => total + of(page), 0);
    const counts = CLASSES.map((_, index) => sum((page) => page.counts[index]));
    const total = sum((page) => page.total);
    const held = total - counts[0] - counts[1];
    const told = `${whole(held)} of ${whole(total)} pages held (${share(held, total)})`;
    at("kv").textContent = total ? told : "this model keeps nothing";
    for (const [rank, canvas] of [...maps.children].entries()) {
      const words = CLASSES.map((name, index) => `${pages[rank].counts[index]} ${name}`).join(", ");
      const core = pages.length > 1 ? ` of core ${rank}` : "";
      canvas.setAttribute("aria-label", `Map of the pages${core}: ${words}`);
    }
    for (const [index, item] of [...at("legend").children].entries()) {
      item.lastChild.textContent = whole(counts[index]);
    }
    const saved = sum((page) => page.saved);
    const cell = Math.max(1, ...pages.map((page) => page.per_cell));
    const notes = [saved ? `Sharing saves ${whole(saved)} pages now.` : ""];
    const retained = sum((page) => page.retained);
    if (retained) notes.push(`${whole(retained)} pages are retained for requests that come back.`);
    if (cell > 1) notes.push(`A cell stands for ${cell} pages, and shows the most shared of them.`);
    const left = total - sum((page) => page.drawn);
    if (left) notes.push(`${whole(left)} more pages, all free, are not drawn.`);
    at("kv-note").textContent = notes.join(" ").trim();
    this.repaint();
  }
}

function driverItem(driver) {
  const item = element("li");
  const kinds = driver.kinds.length > 3 ? ` (${driver.kinds.length})` : driver.kinds.length ? ` (${driver.kinds.join(", ")})` : "";
  item.append(
    element("span", "from", `${driver.distribution} ${driver.version}`),
    element("span", "point", `${driver.point}${kinds}: `),
    element("span", "name", driver.driver),
    element("span", "why", driver.why),
  );
  if (driver.kinds.length > 3) item.title = driver.kinds.join(", ");
  return item;
}
