package interop;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.store.TableFactory;
import co.cask.cdap.messaging.store.hbase.HBaseStore;
import co.cask.cdap.messaging.store.leveldb.LevelDbStore;
import java.io.Closeable;
import java.io.IOException;
import java.util.List;

/** The three tables of a messaging system, which CDAP's factory opens. */
public interface Store extends TableFactory, Closeable {
  /** Returns every topic in the metadata table, on LevelDB also deleted topics with a negative generation. */
  List<TopicMetadata> topics() throws IOException;

  /** Opens a store on HBase if the place is {@code hbase:ZOOKEEPER_PORT:PREFIX}, else in a folder. */
  static Store open(CConfiguration conf, String place) throws IOException {
    String[] parts = place.split(":");
    return parts[0].equals("hbase")
        ? new HBaseStore(conf, Integer.parseInt(parts[1]), parts[2]) : new LevelDbStore(conf);
  }
}
