// Perfetto's trace processor out of the browser. It takes requests from stdin and replies on stdout.
// Arguments: the folder of the engine and its WebAssembly.
const fs = require("node:fs"), path = require("node:path"), vm = require("node:vm");
const worker = vm.createContext({
  console: { log() {}, warn() {}, error() {} },
  setTimeout,
  TextDecoder,
  performance,
  location: { href: "" },
  WorkerGlobalScope: class {},
  importScripts() {},
  XMLHttpRequest: class {
    open(_, name) { this.name = name; }
    send() { this.response = fs.readFileSync(path.join(process.argv[2], this.name)); }
  },
});
worker.self = worker;
const engine = fs.readFileSync(path.join(process.argv[2], "engine_bundle.js"), "utf8");
vm.runInContext(engine, worker);
const port = { postMessage: (bytes) => fs.writeSync(1, bytes) };
worker.onmessage({ data: port });
const Bytes = vm.runInContext("Uint8Array", worker);
setTimeout(() => port.onmessage({ data: new Bytes(fs.readFileSync(0)) }), 0);
