// Runs the script of the status page without a browser: node status_page.js PAGE URL KEY
// Prints one JSON object: the text of each element that the page fills, cells divided by "|".
"use strict";
const [page, url, key] = process.argv.slice(2);
const script = require("fs").readFileSync(page, "utf8").match(/<script[^>]*>([^]*)<\/script>/)[1];
class Element {
  #children = [];
  append(...children) { this.#children.push(...children); }
  replaceChildren(...children) { this.#children = children; }
  insertAdjacentHTML() {}
  set textContent(text) { this.#children = [text]; }
  get textContent() {
    return this.#children.map(each => typeof each === "string" ? each : each.textContent).join("|");
  }
}
const filled = {};
globalThis.document = {
  createElement: () => new Element(),
  getElementById: id => filled[id] ??= new Element(),
};
globalThis.sessionStorage = {getItem: () => key, setItem() {}};
globalThis.prompt = () => "";
const [load, later] = [fetch, setTimeout];
globalThis.fetch = (path, options) => load(url + path, options);
globalThis.setTimeout = (run, ...rest) => {
  if (run.name !== "update") return later(run, ...rest);
  const texts = Object.entries(filled).map(([id, element]) => [id, element.textContent]);
  console.log(JSON.stringify(Object.fromEntries(texts)));
  process.exit(0);
};
(0, eval)(script);
