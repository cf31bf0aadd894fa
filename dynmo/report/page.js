"use strict";
// Reads values off a picture: by the mouse, and by the arrow keys once it has the focus.
const places = new Map(); // the step that is read off each figure, which a live page makes anew
function readOff(figure) {
  const { x, lines, left, width, low, high } = JSON.parse(figure.dataset.lines);
  const picture = figure.querySelector(".picture"), output = figure.querySelector("output");
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  picture.append(cursor);
  let at = x.length - 1;
  function show(index) {
    at = Math.max(0, Math.min(x.length - 1, index));
    cursor.hidden = false;
    places.set(figure.id, x[at]);
    cursor.style.left = 100 * (left + (width * (x[at] - low)) / (high - low)) + "%";
    const values = Object.entries(lines).map(([name, ys]) => ys[at] === null ? "" : `${name} ${ys[at]}`);
    output.textContent = `step ${x[at]}: ${values.filter(Boolean).join(", ")}`;
  }
  if (x.includes(places.get(figure.id))) show(x.indexOf(places.get(figure.id)));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = low + ((event.clientX - box.left) / box.width - left) / width * (high - low);
    let near = x.findIndex((each) => each >= step);
    if (near < 0) near = x.length - 1;
    if (near > 0 && step - x[near - 1] < x[near] - step) near -= 1;
    show(near);
  });
  figure.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(x.length / 20));
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - far, PageDown: at + far, Home: 0, End: x.length - 1 };
    if (event.target === figure && event.key in to) {
      event.preventDefault();
      show(to[event.key]);
    }
  });
}
function prepare(root) {
  for (const figure of root.querySelectorAll("figure[data-lines]")) readOff(figure);
}
prepare(document);

// A live page asks for its body twice a second and replaces the parts that differ.
const state = document.getElementById("state");
let seen = null;
async function refresh() {
  try {
    const answer = await fetch(location.pathname.replace(/\/$/, "") + "/body", { cache: "no-cache" });
    if (!answer.ok) throw new Error(answer.status === 403 ? "the token has changed" : "HTTP " + answer.status);
    const version = answer.headers.get("etag");
    if (version !== seen) {
      const fresh = document.createElement("main");
      fresh.innerHTML = await answer.text();
      replaceParts(fresh);
      seen = version;
    }
    state.textContent = "live";
  } catch (error) {
    state.textContent = "no connection: " + error.message;
  }
  setTimeout(refresh, 500);
}
function replaceParts(fresh) {
  const main = document.getElementById("main"), focused = document.activeElement?.id;
  const open = new Set([...main.querySelectorAll("details[open]")].map((each) => each.id));
  const kept = new Set([...fresh.querySelectorAll("[data-part]")].map((each) => each.dataset.part));
  for (const old of main.querySelectorAll("[data-part]")) if (!kept.has(old.dataset.part)) old.remove();
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const old = main.querySelector(`[data-part="${part.dataset.part}"]`);
    for (const each of part.querySelectorAll("details")) each.open = open.has(each.id);
    if (!old) main.append(part);
    else old.replaceWith(part);
    prepare(part);
  }
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}
if (state) refresh();
