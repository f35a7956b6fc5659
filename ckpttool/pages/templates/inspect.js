(function () {
  'use strict';

  // Everything that comes from the checkpoint is written as text, never as HTML, after `printable`.
  var data = JSON.parse(document.getElementById('data').textContent);
  var names = data.names, stats = data.statistics, diff = data.difference, count = names.length;
  var changed = diff ? diff.changed : {}, only = diff ? new Set(diff.only_here) : null;
  var tip = document.getElementById('tip');

  function $(id) { return document.getElementById(id); }
  function printable(text) {
    return String(text).replace(/[\p{C}\p{Z}]/gu, function (c) {
      if (c === ' ') return c;
      var code = c.codePointAt(0), digits = code.toString(16);
      return code < 256 ? '\\x' + digits.padStart(2, '0') : code < 65536 ? '\\u' + digits.padStart(4, '0') : '\\U' + digits.padStart(8, '0');
    });
  }
  function shorten(text, most) {
    text = printable(text.length > 5000 ? text.slice(0, 2500) + '…' + text.slice(-2500) : text);
    var head = Math.floor((most - 1) / 3);
    return text.length <= most ? text : text.slice(0, head) + '…' + text.slice(text.length - (most - 1 - head));
  }
  function element(tag, text, properties) {
    var e = document.createElement(tag);
    if (text !== undefined && text !== null) e.textContent = text;
    Object.assign(e, properties || {});
    return e;
  }
  function svg(tag, attributes, text) {
    var e = document.createElementNS('http://www.w3.org/2000/svg', tag);
    Object.keys(attributes).forEach(function (k) { e.setAttribute(k, attributes[k]); });
    if (text !== undefined) e.textContent = text;
    return e;
  }
  function human(n) {
    var units = ['B', 'kB', 'MB', 'GB', 'TB'], i = 0;
    while (n >= 1000 && i < 4) { n /= 1000; i++; }
    return (i ? n.toFixed(1) : Math.round(n)) + ' ' + units[i];
  }
  function commas(n) { return n.toLocaleString('en-US'); }
  function counted(n, noun) { return commas(n) + ' ' + noun + (n === 1 ? '' : 's'); }
  function number(x) {
    if (x === null || x === undefined) return '–';
    if (typeof x === 'string') return x;
    if (Number.isInteger(x) && Math.abs(x) < 1e7) return commas(x);
    var small = x !== 0 && Math.abs(x) < 0.01;
    return (small || Math.abs(x) >= 1e7 ? x.toExponential(2) : String(Number(x.toPrecision(4)))).replace(/^-/, '−');
  }
  function float(x) { return typeof x === 'string' ? Number(x.replace('inf', 'Infinity')) : x; }
  // Show a text beside the pointer, or beside an element that has the focus.
  function hint(e, text) {
    function place(x, y) {
      tip.textContent = text;
      tip.hidden = false;
      var width = tip.offsetWidth, height = tip.offsetHeight;
      tip.style.left = Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - width - 4)) + 'px';
      tip.style.top = (y + 18 + height > window.innerHeight ? Math.max(4, y - height - 10) : y + 18) + 'px';
    }
    e.addEventListener('pointermove', function (event) { place(event.clientX, event.clientY); });
    e.addEventListener('pointerleave', function () { tip.hidden = true; });
    e.addEventListener('focus', function () {
      if (!e.matches(':focus-visible')) return;
      var box = e.getBoundingClientRect();
      place(box.left, box.bottom - 14);
    });
    e.addEventListener('blur', function () { tip.hidden = true; });
  }
  window.addEventListener('scroll', function () { tip.hidden = true; }, {passive: true});

  function colourOf(i) { return i < 0 ? 'var(--t7)' : 'var(--t' + i % 7 + ')'; }
  function drawLegend(where, entries) {
    where.replaceChildren.apply(where, entries.map(function (entry) {
      var key = element('span', null, {className: 'key'}), swatch = element('i', null, {className: 'swatch'});
      swatch.style.background = entry[1];
      key.append(swatch, printable(entry[0]));
      return key;
    }));
  }
  function shapeText(i) { return '[' + data.shapes[data.shape[i]].join(', ') + ']'; }
  function elementsOf(i) { return data.shapes[data.shape[i]].reduce(function (a, b) { return a * b; }, 1); }

  // ---------------------------------------------------------------------------------------------- the tree of modules

  // A node is a part of a name; it has the tensor that ends in it, and the nodes of the next parts.
  var nodes = [], modules = new Map();
  function makeNode(name, above) {
    var node = {name: name, above: above, children: null, tensor: -1, bytes: 0, tensors: 0, dtypes: {}, moved: -1, many: 0};
    nodes.push(node);
    return node;
  }
  function childOf(node, name) {
    if (!node.children) node.children = new Map();
    var child = node.children.get(name);
    if (!child) node.children.set(name, child = makeNode(name, node));
    return child;
  }
  var root = makeNode('', null), depth = 48;
  function findModule(path) {
    var node = modules.get(path);
    if (!node) {
      var parts = path.split('.');
      if (parts.length > depth) parts = parts.slice(0, depth).concat(parts.slice(depth).join('.'));
      modules.set(path, node = parts.reduce(childOf, root));
    }
    return node;
  }
  for (var i = 0; i < count; i++) {
    var dot = names[i].lastIndexOf('.'), leaf = childOf(dot < 0 ? root : findModule(names[i].slice(0, dot)), names[i].slice(dot + 1));
    leaf.tensor = i;
    leaf.bytes += data.bytes[i];
    leaf.tensors++;
    leaf.dtypes[data.dtype[i]] = data.bytes[i];
    if (diff && !only.has(i) && !diff.shapes[i]) leaf.moved = changed[i] ? float(changed[i][0]) : 0;
  }
  function addTo(above, node) {
    above.bytes += node.bytes;
    above.tensors += node.tensors;
    for (var k in node.dtypes) above.dtypes[k] = (above.dtypes[k] || 0) + node.dtypes[k];
    above.moved = Math.max(above.moved, node.moved);  // the largest of its tensors; -1 where none was compared
  }
  for (i = nodes.length - 1; i > 0; i--) addTo(nodes[i].above, nodes[i]);
  function pathOf(node) {
    var out = [];
    for (; node.above; node = node.above) out.unshift(node.name);
    return out.join('.');
  }
  // A module with one child alone is drawn as that child.
  function skipSingles(node) {
    while (node.children && node.children.size === 1 && node.tensor < 0) node = node.children.values().next().value;
    return node;
  }
  function largest(counts) {
    return Object.keys(counts).reduce(function (a, b) { return counts[b] > counts[a] ? b : a; });
  }

  // --------------------------------------------------------------------------------------------------- the treemap

  var here = root, map = $('map'), most = 128;
  var colours = {
    dtype: function (node) { return colourOf(Number(largest(node.dtypes))); },
    component: function (node) { return colourOf(components.indexOf(pathOf(node.many ? node.above : node).split('.')[0])); },
    moved: function (node) {
      var far = node.moved;
      if (!(far > 0)) return far < 0 ? 'var(--t5)' : 'var(--t7)';
      return 'color-mix(in srgb, var(--t4) ' + Math.round(Math.max(12, Math.min(100, 100 + 25 * Math.log10(far)))) + '%, var(--t6))';
    }
  };
  var components = root.children ? Array.from(root.children.keys()) : [];

  // Squarified: rows of tiles along the shorter side, as long as that makes them squarer (Bruls, Huizing, van Wijk).
  function squarify(items, x, y, width, height, put) {
    var total = items.reduce(function (sum, item) { return sum + item.bytes; }, 0);
    if (!total || width < 1 || height < 1) return;
    var scale = width * height / total, i = 0;
    while (i < items.length) {
      var side = Math.min(width, height), sum = 0, worst = Infinity, end = i;
      while (end < items.length) {
        var more = sum + items[end].bytes * scale;
        var high = items[i].bytes * scale, low = items[end].bytes * scale;
        var ratio = Math.max(side * side * high / (more * more), more * more / (side * side * low));
        if (ratio > worst) break;
        worst = ratio;
        sum = more;
        end++;
      }
      if (end === i) return;
      var thick = sum / side, at = 0;
      for (var k = i; k < end; k++) {
        var long = items[k].bytes * scale / thick;
        if (width >= height) put(items[k], x, y + at, thick, long);
        else put(items[k], x + at, y, long, thick);
        at += long;
      }
      if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
      i = end;
    }
  }
  function childrenOf(node, limit) {
    var all = Array.from(node.children.values()).filter(function (child) { return child.bytes > 0; });
    all.sort(function (a, b) { return b.bytes - a.bytes; });
    if (all.length <= limit) return all;
    var rest = makeNode('', node);
    all.slice(limit - 1).forEach(function (child) { addTo(rest, child); });
    rest.many = all.length - limit + 1;
    return all.slice(0, limit - 1).concat(rest).sort(function (a, b) { return b.bytes - a.bytes; });
  }
  function describe(node) {
    var inside = skipSingles(node), path = node.many ? counted(node.many, 'smaller module') + ' of ' + (pathOf(node.above) || 'all') : pathOf(inside);
    var lines = [shorten(path, 300), human(node.bytes) + ', ' + (100 * node.bytes / Math.max(1, root.bytes)).toFixed(1) + ' % of all'];
    if (inside.tensor >= 0 && !inside.children) lines.push(data.dtypes[data.dtype[inside.tensor]] + ' ' + shapeText(inside.tensor));
    else lines.push(counted(node.tensors, 'tensor') + ', ' + Object.keys(node.dtypes).map(function (k) { return data.dtypes[k] + ' ' + human(node.dtypes[k]); }).join(', '));
    if (diff && node.moved >= 0) lines.push('relative L2 of the difference: at most ' + number(node.moved));
    return lines.join('\n');
  }
  function labelOf(node, inside) {
    var label = pathOf(inside), above = pathOf(node.above);
    return above ? label.slice(above.length + 1) : label;
  }
  // Modules inside modules, the largest areas first, as long as there is room for more tiles.
  function drawMap() {
    var colour = colours[$('colour').value], wide = map.clientWidth, room = 600, queue = [[here, 0, 0, wide, map.clientHeight, 0]];
    map.replaceChildren();
    function put(node, x, y, w, h, level) {
      if (w < 3 || h < 3) return;
      var inside = skipSingles(node), opens = !node.many && inside.children && level < 5 && w > 70 && h > 46;
      var text = node.many ? '+' + commas(node.many) : shorten(labelOf(node, inside), Math.max(6, Math.floor(w / 7)));
      var e = element('button', w > 26 && h > 15 ? text : '', {type: 'button', className: opens ? 'outer' : ''});
      // in shares of the width, which is another one on paper
      e.style.cssText = 'left:' + 100 * x / wide + '%;top:' + y + 'px;width:' + 100 * w / wide + '%;height:' + h + 'px';
      if (!opens) e.style.background = colour(node.many ? node : inside);
      e.setAttribute('aria-label', describe(node).replace(/\n/g, '; '));
      e.tabIndex = -1;
      hint(e, describe(node));
      e.addEventListener('click', function () { open(node.many ? node.above : inside); });
      map.append(e);
      room--;
      if (opens) queue.push([inside, x + 2, y + 19, w - 4, h - 21, level]);
    }
    while (queue.length && room > 0) {
      queue.sort(function (a, b) { return b[3] * b[4] - a[3] * a[4]; });
      var next = queue.shift(), level = next[5] + 1;
      if (next[0].children) squarify(childrenOf(next[0], Math.min(Math.max(2, room), most)), next[1], next[2], next[3], next[4], function (node, x, y, w, h) { put(node, x, y, w, h, level); });
    }
    if (!map.children.length) map.append(element('p', root.tensors ? 'Nothing here has bytes.' : 'No tensors.', {className: 'hint'}));
    else map.children[0].tabIndex = 0;
    drawCrumbs();
  }
  function drawCrumbs() {
    var trail = [], crumbs = $('crumbs');
    for (var node = here; node; node = node.above) if (node === here || node === root || skipSingles(node) === node) trail.unshift(node);
    crumbs.replaceChildren.apply(crumbs, trail.map(function (node, k) {
      var from = k > 1 ? pathOf(trail[k - 1]).length + 1 : 0;
      var e = element('button', k ? shorten(pathOf(node).slice(from), 40) : 'all, ' + human(root.bytes), {type: 'button'});
      if (node === here) e.setAttribute('aria-current', 'true');
      e.addEventListener('click', function () { open(node); });
      return e;
    }));
  }
  // Zoom into a module, and list its tensors; a tensor is chosen.
  function open(node) {
    tip.hidden = true;
    if (!node.children) { choose({name: names[node.tensor], tensor: node.tensor}, true); return; }
    here = node;
    drawMap();
    filter();
  }
  map.addEventListener('keydown', function (e) {
    var tiles = Array.from(map.children), k = tiles.indexOf(document.activeElement);
    var step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[e.key];
    if (step) k = (k + step + tiles.length) % tiles.length;
    else if (e.key === 'Home') k = 0;
    else if (e.key === 'End') k = tiles.length - 1;
    else if (e.key === 'Escape' || e.key === 'Backspace') {
      if (here.above) {
        var up = here.above;
        while (up.above && skipSingles(up) !== up) up = up.above;
        open(up);
      }
      tiles = Array.from(map.children);
      k = 0;
    } else if (e.key === 'Enter' || e.key === ' ') {
      e.preventDefault();
      document.activeElement.click();
      tiles = Array.from(map.children);
      if (document.activeElement === document.body) k = 0; else return;
    } else return;
    e.preventDefault();
    tiles.forEach(function (tile, n) { tile.tabIndex = n === k ? 0 : -1; });
    if (tiles[k] && tiles[k].focus) tiles[k].focus();
  });
  function drawColours() {
    var kinds = [['dtype', 'dtype'], ['component', 'component']].concat(diff ? [['moved', 'moved']] : []);
    kinds.forEach(function (kind) { $('colour').append(element('option', kind[1], {value: kind[0]})); });
    if (diff) $('colour').value = 'moved';
    function draw() {
      var kind = $('colour').value;
      if (kind === 'dtype') drawLegend($('legend'), data.dtypes.map(function (name, k) { return [name, colourOf(k)]; }));
      else if (kind === 'component') drawLegend($('legend'), components.map(function (name, k) { return [name, colourOf(k)]; }));
      else drawLegend($('legend'), [['equal', 'var(--t7)'], ['only here, or of another shape', 'var(--t5)'], ['moved by less than 0.001 of its norm', 'var(--t6)'], ['moved by its norm or more', 'var(--t4)']]);
      drawMap();
    }
    $('colour').addEventListener('change', draw);
    draw();
  }

  // ----------------------------------------------------------------------------------------------- the list of tensors

  // A row is {name, tensor} or, folded, {name, members: [tensor, ...]}; of a tensor that only the other one has, {name, gone}.
  var list = $('list'), space = $('space'), rows = [], all = [], active = -1, chosen = null, folded = true, kind = 'all', printing = false;
  var lower = null;
  var numeric = ['norm', 'mean', 'std', 'min', 'max', 'zeros', 'nan', 'infinite'];
  var columns = [
    {id: 'name', title: 'name', width: 'minmax(0,1fr)', text: function (r) { return r.name; }},
    {id: 'tensors', title: 'tensors', width: '50px', n: true, value: function (r) { return r.members ? r.members.length : 1; }, hide: function () { return !folded; }},
    {id: 'dtype', title: 'dtype', width: '68px', text: function (r) { return oneOf(r, function (i) { return data.dtypes[data.dtype[i]]; }); }},
    {id: 'shape', title: 'shape', width: '92px', text: function (r) { return oneOf(r, shapeText); }},
    {id: 'bytes', title: 'bytes', width: '68px', n: true, value: function (r) { return sum(r, function (i) { return data.bytes[i]; }); }, format: human}
  ];
  if (stats) numeric.forEach(function (id) {
    if (id === 'zeros' || id === 'nan' || id === 'infinite') { if (!stats[id].some(Boolean)) return; }
    columns.push({id: id, title: id, width: '66px', n: true, value: function (r) { return merged(r)[id]; }, format: number});
  });
  if (diff) columns.push({id: 'moved', title: 'moved', width: '66px', n: true, value: moved, format: function (x) { return x === undefined ? '' : number(x); }});
  function foldName(name) { return name.replace(/(^|[.[])\d+(?=[.\]]|$)/g, '$1#'); }
  function tensorsOf(row) { return row.gone ? [] : row.members || [row.tensor]; }
  function oneOf(row, of) {
    var found = new Set(tensorsOf(row).map(of));
    return found.size === 1 ? found.values().next().value : found.size ? found.size + ' kinds' : 'only in B';
  }
  function sum(row, of) { return tensorsOf(row).reduce(function (a, i) { return a + of(i); }, 0); }
  function moved(row) {  // of several, the largest
    var far;
    tensorsOf(row).forEach(function (i) {
      if (only.has(i) || diff.shapes[i]) return;
      far = Math.max(far === undefined ? 0 : far, changed[i] ? float(changed[i][0]) : 0);
    });
    return far;
  }
  // The statistics of a row, as if its tensors were one.
  function merged(row) {
    if (row.stats) return row.stats;
    var out = null;
    tensorsOf(row).forEach(function (i) {
      var s = {n: stats.elements[i] - stats.nan[i] - stats.infinite[i]};
      numeric.forEach(function (k) { s[k] = float(stats[k][i]); });
      if (!out) { out = s; return; }
      ['zeros', 'nan', 'infinite'].forEach(function (k) { s[k] += out[k]; });
      if (s.mean === null || out.mean === null) {
        var one = s.mean === null ? out : s;
        ['norm', 'mean', 'std', 'min', 'max', 'n'].forEach(function (k) { s[k] = one[k]; });
      } else {
        var total = out.n + s.n, apart = s.mean - out.mean;
        var squares = out.n * out.std * out.std + s.n * s.std * s.std + apart * apart * out.n * s.n / total;
        s.norm = Math.hypot(out.norm, s.norm);
        s.mean = out.mean + apart * s.n / total;
        s.std = Math.sqrt(squares / total);
        s.min = Math.min(out.min, s.min);
        s.max = Math.max(out.max, s.max);
        s.n = total;
      }
      out = s;
    });
    return row.stats = out || {};
  }
  function isKind(i) {
    if (kind === 'changed') return changed[i] || diff.dtypes[i] || diff.shapes[i];
    if (kind === 'here') return only.has(i);
    return kind === 'all';
  }
  // Find the rows of the module that is zoomed into, of the words that are searched for and of the kind that is chosen.
  function filter() {
    var words = $('find').value.toLowerCase().split(/\s+/).filter(Boolean), path = pathOf(here), groups = new Map();
    rows = [];
    for (var i = 0; i < count; i++) {
      var name = names[i];
      if (path && name !== path && !(name.startsWith(path) && name[path.length] === '.')) continue;
      if (!isKind(i)) continue;
      if (words.length) {
        if (!lower) lower = names.map(function (name) { return name.toLowerCase(); });
        var text = lower[i] + ' ' + data.dtypes[data.dtype[i]] + ' ' + shapeText(i);
        if (!words.every(function (word) { return text.indexOf(word) >= 0; })) continue;
      }
      if (folded) {
        var key = foldName(name), group = groups.get(key);
        if (group) group.members.push(i);
        else { groups.set(key, group = {name: key, members: [i]}); rows.push(group); }
      } else rows.push({name: name, tensor: i});
    }
    rows.forEach(function (row) { if (row.members && row.members.length === 1) row.name = names[row.members[0]]; });
    if (diff && (kind === 'there' || kind === 'all') && !path) {
      var gone = folded ? new Set(diff.only_there.map(foldName)) : diff.only_there;
      gone.forEach(function (name) {
        if (words.every(function (word) { return name.toLowerCase().indexOf(word) >= 0; })) rows.push({name: name, gone: true});
      });
    }
    var tensors = rows.reduce(function (n, row) { return n + tensorsOf(row).length; }, 0);
    $('counted').textContent = counted(rows.length, 'row') + ', ' + counted(tensors, 'tensor') + (path ? ' in ' + shorten(path, 80) : '') + ', ' + human(rows.reduce(function (n, row) { return n + columns[4].value(row); }, 0));
    sortRows();
  }
  function sortRows() {
    var id = $('sort').value, column = columns.find(function (c) { return c.id === id; });
    if (column) {
      var keyed = rows.map(function (row, k) {
        var x = column.value ? float(column.value(row)) : id === 'shape' ? -sum(row, elementsOf) / Math.max(1, tensorsOf(row).length) : column.text(row);
        return {row: row, k: k, x: x, none: x === null || x === undefined || x !== x};
      });
      keyed.sort(function (a, b) {
        if (a.none || b.none) return a.none - b.none || a.k - b.k;
        if (a.x === b.x) return a.k - b.k;
        return column.value ? (a.x < b.x ? 1 : -1) : (a.x < b.x ? -1 : 1);
      });
      rows = keyed.map(function (one) { return one.row; });
    }
    active = -1;
    list.scrollTop = 0;
    drawRows();
  }
  function isNarrow() { return window.matchMedia('(max-width:640px)').matches; }
  function shown() {
    var visible = columns.filter(function (c) { return !(c.hide && c.hide()); });
    if (!isNarrow()) return visible;
    var wanted = $('sort').value;
    return visible.filter(function (c) { return ['name', 'dtype', 'shape', 'bytes'].indexOf(c.id) >= 0 || c.id === wanted; });
  }
  function grid(visible) {
    if (printing) return visible.slice(1).map(function (c) { return c.text ? 'minmax(0,1.5fr)' : 'minmax(0,1fr)'; }).join(' ');
    if (!isNarrow()) return visible.map(function (c) { return c.width; }).join(' ');
    return visible.slice(1).map(function (c) { return c.n ? 'max-content' : 'minmax(0,1fr)'; }).join(' ');
  }
  function cell(row, column) {
    if (column.text) return printable(column.text(row));
    if (row.gone) return '';
    var x = column.value(row);
    return column.format ? column.format(x) : commas(x);
  }
  function drawRows() {
    var high = isNarrow() ? 46 : 28, first = 0, end = Math.min(rows.length, 400), visible = shown(), template = grid(visible);
    space.style.height = rows.length * high + 'px';
    if (!printing) {
      first = Math.max(0, Math.floor(list.scrollTop / high) - 6);
      end = Math.min(rows.length, first + Math.ceil(list.clientHeight / high) + 12);
    }
    var fits = Math.floor((space.clientWidth - (isNarrow() ? 14 : visible.slice(1).reduce(function (n, c) { return n + parseInt(c.width, 10) + 8; }, 14))) / 7.8);
    var drawn = [];
    for (var k = first; k < end; k++) drawn.push(drawRow(k, rows[k], visible, template, high, Math.max(16, fits)));
    space.replaceChildren.apply(space, drawn);
    $('titles').style.gridTemplateColumns = template;
    $('titles').replaceChildren.apply($('titles'), visible.map(function (c) { return element('span', c.id === 'moved' && folded ? 'moved ≤' : c.title, {className: c.n ? 'n' : ''}); }));
    $('unprinted').textContent = printing && end < rows.length ? 'The first ' + commas(end) + ' of ' + counted(rows.length, 'row') + '.' : rows.length ? '' : 'No tensor matches.';
    if (active >= first && active < end) list.setAttribute('aria-activedescendant', 'row' + active);
    else list.removeAttribute('aria-activedescendant');
  }
  function drawRow(k, row, visible, template, high, fits) {
    var e = element('div', null, {className: 'row', id: 'row' + k});
    e.setAttribute('role', 'option');
    e.setAttribute('aria-selected', String(k === active));
    e.style.gridTemplateColumns = template;
    e.style.top = k * high + 'px';
    visible.forEach(function (c) {
      var text = c.id === 'name' ? shorten(row.name, printing ? 400 : fits) : cell(row, c);
      e.append(element('span', text, {className: c.id === 'name' ? 'name' : c.n ? 'n' : '', title: c.id === 'name' ? shorten(row.name, 400) : text}));
    });
    e.addEventListener('click', function () { active = k; drawRows(); choose(row); });
    return e;
  }
  list.addEventListener('scroll', function () { requestAnimationFrame(drawRows); }, {passive: true});
  list.addEventListener('keydown', function (e) {
    var high = isNarrow() ? 46 : 28, page = Math.max(1, Math.floor(list.clientHeight / high) - 1);
    var steps = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length};
    if (e.key in steps && rows.length) {
      active = Math.max(0, Math.min(rows.length - 1, active + steps[e.key]));
      list.scrollTop = Math.max(Math.min(list.scrollTop, active * high), (active + 1) * high - list.clientHeight);
      drawRows();
      choose(rows[active]);
    } else if (e.key === 'Enter' && active >= 0 && rows[active].members) unfold(rows[active]);
    else return;
    e.preventDefault();
  });
  // List the tensors of a folded row one by one.
  function unfold(row) {
    folded = false;
    $('fold').setAttribute('aria-pressed', 'false');
    filter();
    var wanted = new Set(row.members);
    rows = rows.filter(function (one) { return wanted.has(one.tensor); });
    $('counted').textContent = counted(rows.length, 'tensor') + ' of ' + shorten(row.name, 80);
    active = -1;
    drawRows();
  }

  // -------------------------------------------------------------------------------------------------- a chosen tensor

  function fileLabel(f) {
    var rank = data.files.ranks[f];
    return (rank >= 0 ? 'rank ' + rank + ', ' : '') + shorten(data.files.names[f], 60);
  }
  function choose(row, scroll) {
    var panel = $('chosen'), first = tensorsOf(row)[0];
    chosen = row;
    panel.replaceChildren(element('h3', shorten(row.name, 300)));
    if (row.gone) { panel.append(element('p', 'Only the other checkpoint has this tensor.')); return; }
    var facts = [['dtype', columns[2].text(row)], ['shape', columns[3].text(row)], ['numbers', commas(sum(row, elementsOf))], ['bytes', human(columns[4].value(row))]];
    if (row.members && row.members.length > 1) facts.unshift(['tensors', commas(row.members.length)]);
    else {
      if (data.group[first] >= 0) facts.push(['param group', data.group[first]]);
      if (data.tied[first] !== undefined) facts.push(['same bytes as', shorten(names[data.tied[first]], 120)]);
      if (stats && stats.codes[first]) facts.push(['codes', stats.codes[first] + ': these are not the numbers of the weight']);
    }
    if (stats) numeric.forEach(function (k) { facts.push([k, number(merged(row)[k])]); });
    if (diff && (!row.members || row.members.length === 1)) {
      if (only.has(first)) facts.push(['difference', 'only in this checkpoint']);
      if (diff.dtypes[first]) facts.push(['dtype of B', diff.dtypes[first]]);
      if (diff.shapes[first]) facts.push(['shape of B', '[' + diff.shapes[first].join(', ') + ']']);
      if (changed[first]) diff.measures.forEach(function (k, n) { facts.push([k.replace(/_/g, ' '), number(changed[first][n])]); });
      else if (moved(row) === 0) facts.push(['values', 'equal to those of B']);
    }
    var dl = element('dl');
    facts.forEach(function (fact) {
      var pair = element('div');
      pair.append(element('dt', fact[0]), element('dd', printable(fact[1])));
      dl.append(pair);
    });
    panel.append(dl);
    if (row.members && row.members.length > 1) {
      var button = element('button', 'list the ' + counted(row.members.length, 'tensor'), {type: 'button'});
      button.addEventListener('click', function () { unfold(row); });
      panel.append(button);
    }
    var two = element('div', null, {className: 'two'});
    drawPlaces(two, first, row.members && row.members.length > 1);
    if (stats && stats.exponents) drawExponents(two, row);
    panel.append(two);
    if (scroll) panel.scrollIntoView({block: 'nearest'});
  }
  // Which file has which rows: the boxes of a tensor, drawn in its first two dimensions that are cut.
  function drawPlaces(where, i, several) {
    var part = element('div'), place = data.places[data.place[i]];
    part.append(element('h3', 'Where its rows are' + (several ? ' (of the first one)' : '')));
    where.append(part);
    if (!place) { part.append(element('p', counted(data.chunks[i], 'chunk') + ': too many to be drawn; inspect --tensor lists them.', {className: 'hint'})); return; }
    var n = place[0], first = place[1], files = place[2], starts = place[3], sizes = place[4], shape = data.shapes[data.shape[i]];
    var high = n ? shape[first] : 1, wide = n > 1 ? shape[first + 1] : 1;
    var picture = svg('svg', {viewBox: '0 0 480 200', role: 'img', 'aria-label': counted(files.length, 'chunk') + ' of this tensor'});
    files.forEach(function (file, k) {
      var y = n ? starts[k * n] / Math.max(1, high) : 0, h = n ? sizes[k * n] / Math.max(1, high) : 1;
      var x = n > 1 ? starts[k * n + 1] / Math.max(1, wide) : 0, w = n > 1 ? sizes[k * n + 1] / Math.max(1, wide) : 1;
      if (!(h > 0 && w > 0)) return;
      var box = svg('rect', {x: 480 * x, y: 200 * y, width: 480 * w, height: 200 * h, class: 'box', 'stroke-width': 200 * h > 6 ? 1 : 0, style: 'fill:' + colourOf(Math.max(data.files.ranks[file], data.files.ranks[file] < 0 ? file : 0))});
      hint(box, spanText(k) + '\n' + fileLabel(file));
      picture.append(box);
      if (200 * h > 15 && 480 * w > 90) picture.append(svg('text', {x: 480 * x + 6, y: 200 * y + Math.min(200 * h / 2 + 4, 100), 'pointer-events': 'none'}, shorten(fileLabel(file), Math.floor(480 * w / 7))));
    });
    function spanText(k) {
      if (!n) return 'all of it';
      var spans = [];
      for (var d = 0; d < n; d++) spans.push('dimension ' + (first + d) + ': ' + starts[k * n + d] + ' to ' + (starts[k * n + d] + sizes[k * n + d]));
      return spans.join(', ');
    }
    part.append(picture);
    if (n) part.append(element('p', 'Dimension ' + first + (n > 1 ? ' from top to bottom, ' + (first + 1) + ' from left to right' : ' from top to bottom') + (n > 2 ? '; the others are not drawn' : '') + '.', {className: 'hint'}));
    var table = element('ul', null, {className: 'names chunks', tabIndex: 0});
    files.slice(0, 256).forEach(function (file, k) { table.append(element('li', spanText(k) + ': ' + fileLabel(file))); });
    if (files.length > 256) table.append(element('li', 'and ' + commas(files.length - 256) + ' more'));
    part.append(table);
  }
  // How many numbers have which binary exponent, on a logarithmic scale.
  function drawExponents(where, row) {
    var counts = new Map(), part = element('div');
    tensorsOf(row).forEach(function (i) {
      var found = stats.exponents[i];
      if (found) found[1].forEach(function (c, k) { if (c) counts.set(found[0] + k, (counts.get(found[0] + k) || 0) + c); });
    });
    part.append(element('h3', 'Numbers by size'));
    where.append(part);
    if (!counts.size) { part.append(element('p', 'No number other than 0.', {className: 'hint'})); return; }
    var low = Math.min.apply(null, Array.from(counts.keys())), high = Math.max.apply(null, Array.from(counts.keys())) + 1;
    var top = Math.log10(1 + Math.max.apply(null, Array.from(counts.values()))), step = 480 / (high - low);
    var picture = svg('svg', {viewBox: '0 0 480 200', role: 'img', 'aria-label': 'histogram of exponents from ' + low + ' to ' + (high - 1)});
    counts.forEach(function (c, e) {
      var h = 165 * Math.log10(1 + c) / top;
      var bar = svg('rect', {x: (e - low) * step + 0.5, y: 175 - h, width: Math.max(0.5, step - 1), height: h, class: 'count'});
      hint(bar, counted(c, 'number') + ' of 2^' + e + ' to 2^' + (e + 1) + '\n' + number(Math.pow(2, e)) + ' to ' + number(Math.pow(2, e + 1)));
      picture.append(bar);
    });
    picture.append(svg('path', {d: 'M0 175.5H480', class: 'axis'}));
    [low, Math.round((low + high) / 2), high].forEach(function (e, k) {
      if (k === 1 && high - low < 2) return;
      picture.append(svg('text', {x: (e - low) * step, y: 193, 'text-anchor': ['start', 'middle', 'end'][k]}, number(Math.pow(2, e))));
    });
    part.append(picture, element('p', 'By absolute value; heights are logarithmic.', {className: 'hint'}));
  }

  // ---------------------------------------------------------------------------------------------------- bytes of files

  function drawFiles(byRank) {
    var files = data.files, kinds = Object.keys(files.components), groups = [];
    files.names.forEach(function (name, f) {
      var key = byRank ? files.ranks[f] : f, group = groups[key + 1];
      if (!group) group = groups[key + 1] = {label: byRank ? (key < 0 ? 'of no rank' : 'rank ' + key) : fileLabel(f), bytes: 0, parts: kinds.map(function () { return 0; })};
      group.bytes += files.bytes[f];
      kinds.forEach(function (k, n) { group.parts[n] += files.components[k][f]; });
    });
    groups = groups.filter(Boolean);
    var full = groups.reduce(function (n, g) { return Math.max(n, g.bytes); }, 1), where = $('bars');
    function text(g) {
      return g.label + ': ' + human(g.bytes) + '\n' + kinds.map(function (k, n) { return printable(k) + ' ' + human(g.parts[n]); }).join(', ');
    }
    if (groups.length <= 32) {
      var ol = element('ol');
      groups.forEach(function (g) {
        var li = element('li'), track = element('span', null, {className: 'track'}), at = 0;
        g.parts.concat(Math.max(0, g.bytes - g.parts.reduce(function (a, b) { return a + b; }, 0))).forEach(function (n, k) {
          var bar = element('span');
          bar.style.cssText = 'left:' + 100 * at / full + '%;width:' + 100 * n / full + '%';
          bar.style.background = colourOf(k < kinds.length ? k : -1);
          at += n;
          track.append(bar);
        });
        li.append(element('span', isNarrow() ? g.label.split(',')[0].slice(-14) : shorten(g.label, 34), {title: g.label}), track, element('span', human(g.bytes)));
        hint(li, text(g));
        ol.append(li);
      });
      where.replaceChildren(ol);
    } else {
      var bins = Math.min(groups.length, 240), picture = svg('svg', {viewBox: '0 0 960 180', role: 'img', 'aria-label': 'bytes of ' + groups.length + ' files'});
      for (var b = 0; b < bins; b++) {
        var these = groups.slice(Math.floor(b * groups.length / bins), Math.floor((b + 1) * groups.length / bins));
        var tallest = these.reduce(function (a, g) { return g.bytes > a.bytes ? g : a; }), y = 180;
        var column = svg('g', {});
        tallest.parts.concat(Math.max(0, tallest.bytes - tallest.parts.reduce(function (a, c) { return a + c; }, 0))).forEach(function (n, k) {
          var h = 176 * n / full;
          y -= h;
          column.append(svg('rect', {x: 960 * b / bins, y: y, width: Math.max(0.6, 960 / bins - 0.8), height: h, style: 'fill:' + colourOf(k < kinds.length ? k : -1)}));
        });
        column.append(svg('rect', {x: 960 * b / bins, y: 0, width: 960 / bins, height: 180, fill: 'transparent'}));
        hint(column, (these.length > 1 ? 'largest of ' + these.length + ': ' : '') + text(tallest));
        picture.append(column);
      }
      var sizes = groups.map(function (g) { return g.bytes; });
      where.replaceChildren(picture, element('p', counted(groups.length, byRank ? 'rank' : 'file') + ', of ' + human(Math.min.apply(null, sizes)) + ' to ' + human(full) + ' each.', {className: 'hint'}));
    }
    drawLegend($('parts'), kinds.map(function (k, n) { return [k, colourOf(n)]; }).concat([['everything else in the file', colourOf(-1)]]));
  }
  function drawSwitches(where, options, picked, change) {
    options.forEach(function (option) {
      var e = element('button', option[1], {type: 'button'});
      e.setAttribute('aria-pressed', String(option[0] === picked));
      e.addEventListener('click', function () {
        Array.from(where.children).forEach(function (other) { other.setAttribute('aria-pressed', String(other === e)); });
        change(option[0]);
      });
      where.append(e, ' ');
    });
  }

  // --------------------------------------------------------------------------------------------------------- beginning

  $('sort').append(element('option', 'order of the checkpoint', {value: ''}));
  columns.forEach(function (c) { if (c.id !== 'tensors') $('sort').append(element('option', c.title, {value: c.id})); });
  if (diff) drawSwitches($('kinds'), [['all', 'all'], ['changed', 'changed'], ['here', 'only in A'], ['there', 'only in B']], 'all', function (picked) { kind = picked; filter(); });
  $('sort').addEventListener('change', filter);
  $('fold').addEventListener('click', function () {
    folded = !folded;
    $('fold').setAttribute('aria-pressed', String(folded));
    filter();
  });
  var pending = 0;
  $('find').addEventListener('input', function () {
    clearTimeout(pending);
    pending = setTimeout(filter, count > 20000 ? 120 : 0);
  });
  var ranks = new Set(data.files.ranks), byRank = ranks.size > 1 && ranks.size < data.files.names.length;
  if (byRank) drawSwitches($('by'), [[true, 'by rank'], [false, 'by file']], true, drawFiles);
  drawColours();
  filter();
  drawFiles(byRank);
  var width = window.innerWidth;
  window.addEventListener('resize', function () {
    if (window.innerWidth === width || printing) return;
    width = window.innerWidth;
    drawMap();
    drawRows();
  });
  window.addEventListener('beforeprint', function () {
    printing = true;
    document.querySelectorAll('details').forEach(function (d) { d.open = true; });
    drawRows();
  });
  window.addEventListener('afterprint', function () { printing = false; drawRows(); });
})();
